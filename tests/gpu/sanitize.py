"""One small problem a kernel, for compute-sanitizer --tool memcheck (or racecheck) python tests/gpu/sanitize.py."""

import torch

from forge.ops.attention import attention

torch.manual_seed(0)
for D, dtype in ((64, torch.bfloat16), (80, torch.bfloat16), (64, torch.float32)):
    q, k, v = (torch.randn(1, 150, heads, D, device="cuda", dtype=dtype, requires_grad=True) for heads in (2, 1, 1))
    starts = (torch.arange(150, device="cuda") // 70 * 70).int()[None]
    attention(q, k, v, starts=starts, window=60, backend="triton").sum().backward()
    attention(q[:, :1], *(torch.randn(1, 1100, 1, D, device="cuda", dtype=dtype) for _ in range(2)), backend="triton")
    torch.cuda.synchronize()
    print(D, dtype, "done")
