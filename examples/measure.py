"""Bits per byte on a text, and accuracy on a task of one's own in the form of a .jsonl file.

    python examples/measure.py runs/novel another.txt
"""

import json
import sys
import tempfile
from pathlib import Path

import forge
from forge.tasks import run_tasks

run, text = sys.argv[1], sys.argv[2]
result = forge.evaluate(run, [text])
print(f"{text}: {result.bpb:.3f} bits per byte, {result.loss:.3f} nats per token over {result.tokens:,} tokens")

# multiple choice: the likelier ending should be the right one. Other forms: forge/tasks.py
questions = [{"query": "The opposite of day is", "choices": ["night", "table"], "gold": 0},
             {"query": "The king sat upon his", "choices": ["throne", "xqzjv"], "gold": 0}]
with tempfile.TemporaryDirectory() as folder:
    Path(folder, "copa.jsonl").write_text("\n".join(map(json.dumps, questions)))
    task = run_tasks(*forge.load_model(run), ["copa"], folder)["copa"]
print(f"accuracy {task.accuracy:.2f} ± {task.accuracy_stderr:.2f}, chance {task.chance:.2f}")
