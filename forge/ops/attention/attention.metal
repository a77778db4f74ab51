// Fused causal attention on Apple GPUs, forward and backward (FlashAttention-2, arXiv:2307.08691): nothing of size T * S is
// ever written. metal.py launches these kernels. No atomics: a thread, or a simdgroup, owns what it sums, so results are equal
// to the bit, run after run.
//
// Two designs, a table in metal.py says which. `rows`: a thread owns a query (a key, in dK and dV) and walks over tiles of the
// other side that its group holds in threadgroup memory. `tiles`: a simdgroup owns eight of them and works with 8 x 8 matrices;
// what happens to single elements (mask, softmax) goes through threadgroup memory, since how lanes hold a matrix is not
// documented. All sums are in float.
//
// ASCII and C++14 alone. T, D, BN and the like are template arguments; metal.py writes the instances.

#include <metal_stdlib>
using namespace metal;

struct Problem {
    int T, S, H, K;                     // queries, keys, heads of queries, heads of keys
    int causal, window, starts;         // window 0: none; starts 0: none are given
    float scale, softcap;               // softcap 0: none
    int unused;
    long q[3], k[3], v[3], dout[3];     // elements from one batch entry, token, head to the next
};

constant float LOG2E = 1.44269504088896340736f;
constant float LN2 = 0.69314718055994530942f;

// The keys first .. last that query i sees.
inline int first_key(int i, int start, constant Problem& p) {
    int first = p.starts ? max(start, 0) : 0;
    return p.window ? max(first, i + p.S - p.T - p.window + 1) : first;
}

inline int last_key(int i, constant Problem& p) {
    return p.causal ? min(i + p.S - p.T, p.S - 1) : p.S - 1;
}

// The queries first .. last that may see one of the keys n0 .. n1.
inline int first_query(int n0, constant Problem& p) {
    return p.causal ? max(0, n0 - (p.S - p.T)) : 0;
}

inline int last_query(int n1, const device int* starts, constant Problem& p) {
    int last = p.window ? min(p.T - 1, n1 - (p.S - p.T) + p.window - 1) : p.T - 1;
    if (!p.starts) return last;
    int low = 0, high = p.T;            // how many queries start at or before n1: starts do not decrease
    while (low < high) {
        int middle = (low + high) / 2;
        if (starts[middle] <= n1) low = middle + 1;
        else high = middle;
    }
    return min(last, low - 1);
}

// A logit in powers of two, from q.k; and how it changes with scale * q.k.
inline float logit(float dot, constant Problem& p) {
    float s = dot * p.scale;
    if (p.softcap > 0.0f) s = p.softcap * precise::tanh(s / p.softcap);
    return s * LOG2E;
}

inline float slope(float logit, constant Problem& p) {
    if (p.softcap == 0.0f) return 1.0f;
    float part = logit * LN2 / p.softcap;
    return 1.0f - part * part;
}

// delta = rowsum(dO * O) - dlse, a float a query: what the softmax takes off every dP of a row.
template <typename T, int D>
kernel void delta(const device T* out [[buffer(0)]], const device T* dout [[buffer(1)]], const device float* dlse [[buffer(2)]],
                  device float* delta [[buffer(3)]], constant Problem& p [[buffer(4)]], constant int& has_dlse [[buffer(5)]],
                  uint3 at [[thread_position_in_grid]]) {
    int i = at.x, h = at.y, b = at.z;
    if (i >= p.T) return;
    const device T* o = out + ((long(b) * p.T + i) * p.H + h) * D;
    const device T* d = dout + b * p.dout[0] + i * p.dout[1] + h * p.dout[2];
    float sum = 0.0f;
    for (int c = 0; c < D; c++) sum += float(o[c]) * float(d[c]);
    long row = (long(b) * p.H + h) * p.T + i;
    delta[row] = has_dlse ? sum - dlse[row] : sum;
}

// Rows n0 .. n0 + N - 1 of a head into threadgroup memory, zeros behind the last.
template <typename T, int D, int N, int THREADS>
inline void stage(threadgroup float* tile, const device T* x, long stride, int n0, int rows, uint thread_) {
    for (int i = thread_; i < N * D; i += THREADS) {
        int n = n0 + i / D;
        tile[i] = n < rows ? float(x[n * stride + i % D]) : 0.0f;
    }
}

// --- rows: a thread owns a row

constant constexpr int ROWS = 32;       // threads in a group

template <typename T, int D, int BN>
kernel void forward_rows(const device T* q [[buffer(0)]], const device T* k [[buffer(1)]], const device T* v [[buffer(2)]],
                         const device int* starts [[buffer(3)]], device T* out [[buffer(4)]], device float* lse [[buffer(5)]],
                         constant Problem& p [[buffer(6)]], uint3 group [[threadgroup_position_in_grid]],
                         uint me [[thread_index_in_threadgroup]]) {
    threadgroup float keys[BN * D];
    threadgroup float values[BN * D];
    int h = group.y, b = group.z, top = int(group.x) * ROWS, i = top + int(me);
    int bottom = min(top + ROWS, p.T) - 1, row = min(i, bottom);
    const device int* start = starts + long(b) * p.T;
    int first = first_key(row, p.starts ? start[row] : 0, p), last = last_key(row, p);
    const device T* mine = q + b * p.q[0] + row * p.q[1] + h * p.q[2];
    k += b * p.k[0] + (h / (p.H / p.K)) * p.k[2];
    v += b * p.v[0] + (h / (p.H / p.K)) * p.v[2];
    float query[D], sum[D];
    for (int c = 0; c < D; c++) {
        query[c] = float(mine[c]);
        sum[c] = 0.0f;
    }
    float m = -FLT_MAX, l = 0.0f;
    int from = first_key(top, p.starts ? start[top] : 0, p) / BN * BN, to = last_key(bottom, p);
    for (int n0 = from; n0 <= to; n0 += BN) {
        threadgroup_barrier(mem_flags::mem_threadgroup);
        stage<T, D, BN, ROWS>(keys, k, p.k[1], n0, p.S, me);
        stage<T, D, BN, ROWS>(values, v, p.v[1], n0, p.S, me);
        threadgroup_barrier(mem_flags::mem_threadgroup);
        float s[BN], largest = m;
        for (int n = 0; n < BN; n++) {
            float dot = 0.0f;
            for (int c = 0; c < D; c++) dot += query[c] * keys[n * D + c];
            bool seen = n0 + n >= first && n0 + n <= last;
            s[n] = seen ? logit(dot, p) : -INFINITY;
            largest = max(largest, s[n]);
        }
        float shrink = exp2(m - largest);
        m = largest;
        l *= shrink;
        for (int c = 0; c < D; c++) sum[c] *= shrink;
        for (int n = 0; n < BN; n++) {
            float e = exp2(s[n] - m);
            l += e;
            for (int c = 0; c < D; c++) sum[c] += e * values[n * D + c];
        }
    }
    if (i >= p.T) return;
    device T* o = out + ((long(b) * p.T + i) * p.H + h) * D;
    for (int c = 0; c < D; c++) o[c] = T(l > 0.0f ? sum[c] / l : 0.0f);
    lse[(long(b) * p.H + h) * p.T + i] = l > 0.0f ? (m + log2(l)) * LN2 : -INFINITY;
}

template <typename T, int D, int BN>
kernel void dq_rows(const device T* q [[buffer(0)]], const device T* k [[buffer(1)]], const device T* v [[buffer(2)]],
                    const device int* starts [[buffer(3)]], const device T* dout [[buffer(4)]],
                    const device float* lse [[buffer(5)]], const device float* delta [[buffer(6)]], device T* dq [[buffer(7)]],
                    constant Problem& p [[buffer(8)]], uint3 group [[threadgroup_position_in_grid]],
                    uint me [[thread_index_in_threadgroup]]) {
    threadgroup float keys[BN * D];
    threadgroup float values[BN * D];
    int h = group.y, b = group.z, top = int(group.x) * ROWS, i = top + int(me);
    int bottom = min(top + ROWS, p.T) - 1, row = min(i, bottom);
    const device int* start = starts + long(b) * p.T;
    int first = first_key(row, p.starts ? start[row] : 0, p), last = last_key(row, p);
    const device T* mine = q + b * p.q[0] + row * p.q[1] + h * p.q[2];
    const device T* above = dout + b * p.dout[0] + row * p.dout[1] + h * p.dout[2];
    k += b * p.k[0] + (h / (p.H / p.K)) * p.k[2];
    v += b * p.v[0] + (h / (p.H / p.K)) * p.v[2];
    long at = (long(b) * p.H + h) * p.T + row;
    float off = lse[at] * LOG2E, taken = delta[at];
    float query[D], gradient[D], sum[D];
    for (int c = 0; c < D; c++) {
        query[c] = float(mine[c]);
        gradient[c] = float(above[c]);
        sum[c] = 0.0f;
    }
    int from = first_key(top, p.starts ? start[top] : 0, p) / BN * BN, to = last_key(bottom, p);
    for (int n0 = from; n0 <= to; n0 += BN) {
        threadgroup_barrier(mem_flags::mem_threadgroup);
        stage<T, D, BN, ROWS>(keys, k, p.k[1], n0, p.S, me);
        stage<T, D, BN, ROWS>(values, v, p.v[1], n0, p.S, me);
        threadgroup_barrier(mem_flags::mem_threadgroup);
        for (int n = max(first - n0, 0); n <= min(last - n0, BN - 1); n++) {
            float dot = 0.0f, dp = 0.0f;
            for (int c = 0; c < D; c++) {
                dot += query[c] * keys[n * D + c];
                dp += gradient[c] * values[n * D + c];
            }
            float s = logit(dot, p);
            float ds = exp2(s - off) * (dp - taken) * slope(s, p);
            for (int c = 0; c < D; c++) sum[c] += ds * keys[n * D + c];
        }
    }
    if (i >= p.T) return;
    device T* to_ = dq + ((long(b) * p.T + i) * p.H + h) * D;
    for (int c = 0; c < D; c++) to_[c] = T(sum[c] * p.scale);
}

// DK and DV say which gradients this kernel makes: both where registers allow it.
template <typename T, int D, int BM, int DK, int DV>
kernel void dkdv_rows(const device T* q [[buffer(0)]], const device T* k [[buffer(1)]], const device T* v [[buffer(2)]],
                      const device int* starts [[buffer(3)]], const device T* dout [[buffer(4)]],
                      const device float* lse [[buffer(5)]], const device float* delta [[buffer(6)]],
                      device T* dk [[buffer(7)]], device T* dv [[buffer(8)]], constant Problem& p [[buffer(9)]],
                      uint3 group [[threadgroup_position_in_grid]], uint me [[thread_index_in_threadgroup]]) {
    threadgroup float queries[BM * D];
    threadgroup float gradients[BM * D];
    threadgroup float offs[BM];
    threadgroup float takens[BM];
    threadgroup int firsts[BM];
    int hk = group.y, b = group.z, top = int(group.x) * ROWS, n = top + int(me), bottom = min(top + ROWS, p.S) - 1;
    int row = min(n, bottom), G = p.H / p.K;
    const device int* start = starts + long(b) * p.T;
    const device T* mine = k + b * p.k[0] + row * p.k[1] + hk * p.k[2];
    const device T* value_ = v + b * p.v[0] + row * p.v[1] + hk * p.v[2];
    float key[D], value[D], key_sum[DK ? D : 1], value_sum[DV ? D : 1];
    for (int c = 0; c < D; c++) {
        key[c] = float(mine[c]);
        if (DK) {
            value[c] = float(value_[c]);
            key_sum[c] = 0.0f;
        }
        if (DV) value_sum[c] = 0.0f;
    }
    int from = first_query(top, p) / BM * BM, to = last_query(bottom, start, p);
    for (int h = hk * G; h < hk * G + G; h++) {
        const device T* qh = q + b * p.q[0] + h * p.q[2];
        const device T* dh = dout + b * p.dout[0] + h * p.dout[2];
        long at = (long(b) * p.H + h) * p.T;
        for (int m0 = from; m0 <= to; m0 += BM) {
            threadgroup_barrier(mem_flags::mem_threadgroup);
            stage<T, D, BM, ROWS>(queries, qh, p.q[1], m0, p.T, me);
            stage<T, D, BM, ROWS>(gradients, dh, p.dout[1], m0, p.T, me);
            for (int m = me; m < BM; m += ROWS) {
                int i = min(m0 + m, p.T - 1);
                offs[m] = lse[at + i] * LOG2E;
                takens[m] = delta[at + i];
                firsts[m] = m0 + m < p.T ? first_key(i, p.starts ? start[i] : 0, p) : p.S;
            }
            threadgroup_barrier(mem_flags::mem_threadgroup);
            for (int m = 0; m < BM; m++) {
                if (row < firsts[m] || row > last_key(m0 + m, p)) continue;
                float dot = 0.0f, dp = 0.0f;
                for (int c = 0; c < D; c++) dot += queries[m * D + c] * key[c];
                float s = logit(dot, p), e = exp2(s - offs[m]);
                if (DV) {
                    for (int c = 0; c < D; c++) value_sum[c] += e * gradients[m * D + c];
                }
                if (DK) {
                    for (int c = 0; c < D; c++) dp += gradients[m * D + c] * value[c];
                    float ds = e * (dp - takens[m]) * slope(s, p);
                    for (int c = 0; c < D; c++) key_sum[c] += ds * queries[m * D + c];
                }
            }
        }
    }
    if (n >= p.S) return;
    long to_ = ((long(b) * p.S + n) * p.K + hk) * D;
    for (int c = 0; c < D; c++) {
        if (DK) dk[to_ + c] = T(key_sum[c] * p.scale);
        if (DV) dv[to_ + c] = T(value_sum[c]);
    }
}

// --- tiles: a simdgroup owns eight rows

constant constexpr int SIMDGROUPS = 4;
constant constexpr int OWNED = 8 * SIMDGROUPS;      // rows of a group of threads
constant constexpr int ACROSS = 16;                 // rows of the other side in a tile; two such tiles hold OWNED rows
constant constexpr int BLOCK = 8 * ACROSS;          // logits of a simdgroup

// The eight rows of this simdgroup, out of the OWNED rows in a tile, as D / 8 matrices.
template <int D>
inline void load_owned(thread simdgroup_float8x8* m, const threadgroup float* tile, uint simdgroup_) {
    for (int c = 0; c < D / 8; c++) simdgroup_load(m[c], tile + simdgroup_ * 8 * D + 8 * c, D);
}

// Times scale, back into rows n0 .. n0 + 7 of x, through the tile.
template <typename T, int D>
inline void store_owned(thread simdgroup_float8x8* m, threadgroup float* tile, device T* x, long stride, int n0, int rows,
                        float scale, uint simdgroup_, uint lane) {
    threadgroup float* mine = tile + simdgroup_ * 8 * D;
    for (int c = 0; c < D / 8; c++) simdgroup_store(m[c], mine + 8 * c, D);
    simdgroup_barrier(mem_flags::mem_threadgroup);
    for (int i = lane; i < 8 * D; i += 32) {
        int n = n0 + i / D;
        if (n < rows) x[n * stride + i % D] = T(mine[i] * scale);
    }
}

// block = a tile^T: eight owned rows against ACROSS others.
template <int D>
inline void times_transposed(const thread simdgroup_float8x8* a, const threadgroup float* tile, threadgroup float* block) {
    for (int n = 0; n < ACROSS / 8; n++) {
        simdgroup_float8x8 sum = make_filled_simdgroup_matrix<float, 8, 8>(0.0f);
        for (int c = 0; c < D / 8; c++) {
            simdgroup_float8x8 b;
            simdgroup_load(b, tile + n * 8 * D + 8 * c, D, ulong2(0, 0), true);
            simdgroup_multiply_accumulate(sum, a[c], b, sum);
        }
        simdgroup_store(sum, block + 8 * n, ACROSS);
    }
}

// sum += block tile.
template <int D>
inline void add_times(thread simdgroup_float8x8* sum, const threadgroup float* block, const threadgroup float* tile) {
    for (int n = 0; n < ACROSS / 8; n++) {
        simdgroup_float8x8 a, b;
        simdgroup_load(a, block + 8 * n, ACROSS);
        for (int c = 0; c < D / 8; c++) {
            simdgroup_load(b, tile + n * 8 * D + 8 * c, D);
            simdgroup_multiply_accumulate(sum[c], a, b, sum[c]);
        }
    }
}

// Each of the eight rows times its factor, by a diagonal matrix.
template <int D>
inline void times_rows(thread simdgroup_float8x8* m, threadgroup float* diagonal, float factor, uint lane) {
    int row = lane / 4, column = lane % 4 * 2;
    diagonal[row * 8 + column] = row == column ? factor : 0.0f;
    diagonal[row * 8 + column + 1] = row == column + 1 ? factor : 0.0f;
    simdgroup_barrier(mem_flags::mem_threadgroup);
    simdgroup_float8x8 factors;
    simdgroup_load(factors, diagonal, 8);
    for (int c = 0; c < D / 8; c++) {
        simdgroup_float8x8 scaled;
        simdgroup_multiply(scaled, factors, m[c]);
        m[c] = scaled;
    }
}

template <typename T, int D>
kernel void forward_tiles(const device T* q [[buffer(0)]], const device T* k [[buffer(1)]], const device T* v [[buffer(2)]],
                          const device int* starts [[buffer(3)]], device T* out [[buffer(4)]], device float* lse [[buffer(5)]],
                          constant Problem& p [[buffer(6)]], uint3 group [[threadgroup_position_in_grid]],
                          uint me [[thread_index_in_threadgroup]], uint lane [[thread_index_in_simdgroup]],
                          uint simdgroup_ [[simdgroup_index_in_threadgroup]]) {
    threadgroup float tile[OWNED * D];
    threadgroup float blocks[SIMDGROUPS * BLOCK];
    threadgroup float diagonals[SIMDGROUPS * 64];
    threadgroup float* keys = tile;
    threadgroup float* values = tile + ACROSS * D;
    threadgroup float* block = blocks + simdgroup_ * BLOCK;
    threadgroup float* diagonal = diagonals + simdgroup_ * 64;
    int h = group.y, b = group.z, top = int(group.x) * OWNED, bottom = min(top + OWNED, p.T) - 1;
    int mine = top + int(simdgroup_) * 8, i = mine + int(lane) / 4, row = min(i, bottom);      // four lanes a row
    const device int* start = starts + long(b) * p.T;
    int first = first_key(row, p.starts ? start[row] : 0, p), last = last_key(row, p);
    q += b * p.q[0] + h * p.q[2];
    k += b * p.k[0] + (h / (p.H / p.K)) * p.k[2];
    v += b * p.v[0] + (h / (p.H / p.K)) * p.v[2];
    simdgroup_float8x8 query[D / 8], sum[D / 8];
    stage<T, D, OWNED, 32 * SIMDGROUPS>(tile, q, p.q[1], top, p.T, me);
    threadgroup_barrier(mem_flags::mem_threadgroup);
    load_owned<D>(query, tile, simdgroup_);
    for (int c = 0; c < D / 8; c++) sum[c] = make_filled_simdgroup_matrix<float, 8, 8>(0.0f);
    float m = -FLT_MAX, l = 0.0f;
    int from = first_key(top, p.starts ? start[top] : 0, p) / ACROSS * ACROSS, to = last_key(bottom, p);
    for (int n0 = from; n0 <= to; n0 += ACROSS) {
        threadgroup_barrier(mem_flags::mem_threadgroup);
        stage<T, D, ACROSS, 32 * SIMDGROUPS>(keys, k, p.k[1], n0, p.S, me);
        stage<T, D, ACROSS, 32 * SIMDGROUPS>(values, v, p.v[1], n0, p.S, me);
        threadgroup_barrier(mem_flags::mem_threadgroup);
        times_transposed<D>(query, keys, block);
        simdgroup_barrier(mem_flags::mem_threadgroup);
        threadgroup float* part = block + lane / 4 * ACROSS + lane % 4 * (ACROSS / 4);
        int n = n0 + int(lane) % 4 * (ACROSS / 4);
        float s[ACROSS / 4], largest = m, e = 0.0f;
        for (int j = 0; j < ACROSS / 4; j++) {
            s[j] = n + j >= first && n + j <= last ? logit(part[j], p) : -INFINITY;
            largest = max(largest, s[j]);
        }
        largest = max(largest, simd_shuffle_xor(largest, 1));
        largest = max(largest, simd_shuffle_xor(largest, 2));
        for (int j = 0; j < ACROSS / 4; j++) {
            s[j] = exp2(s[j] - largest);
            part[j] = s[j];
            e += s[j];
        }
        e += simd_shuffle_xor(e, 1);
        e += simd_shuffle_xor(e, 2);
        float shrink = exp2(m - largest);
        m = largest;
        l = l * shrink + e;
        times_rows<D>(sum, diagonal, shrink, lane);
        add_times<D>(sum, block, values);
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);
    times_rows<D>(sum, diagonal, l > 0.0f ? 1.0f / l : 0.0f, lane);
    store_owned<T, D>(sum, tile, out + (long(b) * p.T * p.H + h) * D, long(p.H) * D, mine, p.T, 1.0f, simdgroup_, lane);
    if (lane % 4 == 0 && i < p.T)
        lse[(long(b) * p.H + h) * p.T + i] = l > 0.0f ? (m + log2(l)) * LN2 : -INFINITY;
}

template <typename T, int D>
kernel void dq_tiles(const device T* q [[buffer(0)]], const device T* k [[buffer(1)]], const device T* v [[buffer(2)]],
                     const device int* starts [[buffer(3)]], const device T* dout [[buffer(4)]],
                     const device float* lse [[buffer(5)]], const device float* delta [[buffer(6)]], device T* dq [[buffer(7)]],
                     constant Problem& p [[buffer(8)]], uint3 group [[threadgroup_position_in_grid]],
                     uint me [[thread_index_in_threadgroup]], uint lane [[thread_index_in_simdgroup]],
                     uint simdgroup_ [[simdgroup_index_in_threadgroup]]) {
    threadgroup float tile[OWNED * D];
    threadgroup float blocks[SIMDGROUPS * 2 * BLOCK];
    threadgroup float* keys = tile;
    threadgroup float* values = tile + ACROSS * D;
    threadgroup float* block = blocks + simdgroup_ * 2 * BLOCK;
    int h = group.y, b = group.z, top = int(group.x) * OWNED, bottom = min(top + OWNED, p.T) - 1;
    int mine = top + int(simdgroup_) * 8, row = min(mine + int(lane) / 4, bottom);
    const device int* start = starts + long(b) * p.T;
    int first = first_key(row, p.starts ? start[row] : 0, p), last = last_key(row, p);
    k += b * p.k[0] + (h / (p.H / p.K)) * p.k[2];
    v += b * p.v[0] + (h / (p.H / p.K)) * p.v[2];
    long at = (long(b) * p.H + h) * p.T + row;
    float off = lse[at] * LOG2E, taken = delta[at];
    simdgroup_float8x8 query[D / 8], gradient[D / 8], sum[D / 8];
    stage<T, D, OWNED, 32 * SIMDGROUPS>(tile, q + b * p.q[0] + h * p.q[2], p.q[1], top, p.T, me);
    threadgroup_barrier(mem_flags::mem_threadgroup);
    load_owned<D>(query, tile, simdgroup_);
    threadgroup_barrier(mem_flags::mem_threadgroup);
    stage<T, D, OWNED, 32 * SIMDGROUPS>(tile, dout + b * p.dout[0] + h * p.dout[2], p.dout[1], top, p.T, me);
    threadgroup_barrier(mem_flags::mem_threadgroup);
    load_owned<D>(gradient, tile, simdgroup_);
    for (int c = 0; c < D / 8; c++) sum[c] = make_filled_simdgroup_matrix<float, 8, 8>(0.0f);
    int from = first_key(top, p.starts ? start[top] : 0, p) / ACROSS * ACROSS, to = last_key(bottom, p);
    for (int n0 = from; n0 <= to; n0 += ACROSS) {
        threadgroup_barrier(mem_flags::mem_threadgroup);
        stage<T, D, ACROSS, 32 * SIMDGROUPS>(keys, k, p.k[1], n0, p.S, me);
        stage<T, D, ACROSS, 32 * SIMDGROUPS>(values, v, p.v[1], n0, p.S, me);
        threadgroup_barrier(mem_flags::mem_threadgroup);
        times_transposed<D>(query, keys, block);
        times_transposed<D>(gradient, values, block + BLOCK);
        simdgroup_barrier(mem_flags::mem_threadgroup);
        threadgroup float* part = block + lane / 4 * ACROSS + lane % 4 * (ACROSS / 4);
        int n = n0 + int(lane) % 4 * (ACROSS / 4);
        for (int j = 0; j < ACROSS / 4; j++) {
            float s = logit(part[j], p);
            bool seen = n + j >= first && n + j <= last;
            part[j] = seen ? exp2(s - off) * (part[BLOCK + j] - taken) * slope(s, p) : 0.0f;
        }
        simdgroup_barrier(mem_flags::mem_threadgroup);
        add_times<D>(sum, block, keys);
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);
    store_owned<T, D>(sum, tile, dq + (long(b) * p.T * p.H + h) * D, long(p.H) * D, mine, p.T, p.scale, simdgroup_, lane);
}

template <typename T, int D, int DK, int DV>
kernel void dkdv_tiles(const device T* q [[buffer(0)]], const device T* k [[buffer(1)]], const device T* v [[buffer(2)]],
                       const device int* starts [[buffer(3)]], const device T* dout [[buffer(4)]],
                       const device float* lse [[buffer(5)]], const device float* delta [[buffer(6)]],
                       device T* dk [[buffer(7)]], device T* dv [[buffer(8)]], constant Problem& p [[buffer(9)]],
                       uint3 group [[threadgroup_position_in_grid]], uint me [[thread_index_in_threadgroup]],
                       uint lane [[thread_index_in_simdgroup]], uint simdgroup_ [[simdgroup_index_in_threadgroup]]) {
    threadgroup float tile[OWNED * D];
    threadgroup float blocks[SIMDGROUPS * 2 * BLOCK];
    threadgroup float offs[ACROSS];
    threadgroup float takens[ACROSS];
    threadgroup int firsts[ACROSS];
    threadgroup float* queries = tile;
    threadgroup float* gradients = tile + ACROSS * D;
    threadgroup float* block = blocks + simdgroup_ * 2 * BLOCK;
    int hk = group.y, b = group.z, top = int(group.x) * OWNED, bottom = min(top + OWNED, p.S) - 1, G = p.H / p.K;
    int mine = top + int(simdgroup_) * 8, n = mine + int(lane) / 4;
    const device int* start = starts + long(b) * p.T;
    simdgroup_float8x8 key[D / 8], value[DK ? D / 8 : 1], key_sum[DK ? D / 8 : 1], value_sum[DV ? D / 8 : 1];
    stage<T, D, OWNED, 32 * SIMDGROUPS>(tile, k + b * p.k[0] + hk * p.k[2], p.k[1], top, p.S, me);
    threadgroup_barrier(mem_flags::mem_threadgroup);
    load_owned<D>(key, tile, simdgroup_);
    if (DK) {
        threadgroup_barrier(mem_flags::mem_threadgroup);
        stage<T, D, OWNED, 32 * SIMDGROUPS>(tile, v + b * p.v[0] + hk * p.v[2], p.v[1], top, p.S, me);
        threadgroup_barrier(mem_flags::mem_threadgroup);
        load_owned<D>(value, tile, simdgroup_);
    }
    for (int c = 0; c < D / 8; c++) {
        if (DK) key_sum[c] = make_filled_simdgroup_matrix<float, 8, 8>(0.0f);
        if (DV) value_sum[c] = make_filled_simdgroup_matrix<float, 8, 8>(0.0f);
    }
    int from = first_query(top, p) / ACROSS * ACROSS, to = last_query(bottom, start, p);
    for (int h = hk * G; h < hk * G + G; h++) {
        long at = (long(b) * p.H + h) * p.T;
        for (int m0 = from; m0 <= to; m0 += ACROSS) {
            threadgroup_barrier(mem_flags::mem_threadgroup);
            stage<T, D, ACROSS, 32 * SIMDGROUPS>(queries, q + b * p.q[0] + h * p.q[2], p.q[1], m0, p.T, me);
            stage<T, D, ACROSS, 32 * SIMDGROUPS>(gradients, dout + b * p.dout[0] + h * p.dout[2], p.dout[1], m0, p.T, me);
            if (me < uint(ACROSS)) {
                int i = min(m0 + int(me), p.T - 1);
                offs[me] = lse[at + i] * LOG2E;
                takens[me] = delta[at + i];
                firsts[me] = m0 + int(me) < p.T ? first_key(i, p.starts ? start[i] : 0, p) : p.S;
            }
            threadgroup_barrier(mem_flags::mem_threadgroup);
            times_transposed<D>(key, queries, block);
            if (DK) times_transposed<D>(value, gradients, block + BLOCK);
            simdgroup_barrier(mem_flags::mem_threadgroup);
            threadgroup float* part = block + lane / 4 * ACROSS + lane % 4 * (ACROSS / 4);
            for (int j = 0; j < ACROSS / 4; j++) {
                int m = int(lane) % 4 * (ACROSS / 4) + j;
                bool seen = n < p.S && n >= firsts[m] && n <= last_key(m0 + m, p);
                float s = logit(part[j], p), e = seen ? exp2(s - offs[m]) : 0.0f;
                if (DK) part[BLOCK + j] = seen ? e * (part[BLOCK + j] - takens[m]) * slope(s, p) : 0.0f;
                part[j] = e;
            }
            simdgroup_barrier(mem_flags::mem_threadgroup);
            if (DV) add_times<D>(value_sum, block, gradients);
            if (DK) add_times<D>(key_sum, block + BLOCK, queries);
        }
    }
    long to_ = (long(b) * p.S * p.K + hk) * D, stride = long(p.K) * D;
    threadgroup_barrier(mem_flags::mem_threadgroup);
    if (DK) store_owned<T, D>(key_sum, tile, dk + to_, stride, mine, p.S, p.scale, simdgroup_, lane);
    if (DK && DV) simdgroup_barrier(mem_flags::mem_threadgroup);
    if (DV) store_owned<T, D>(value_sum, tile, dv + to_, stride, mine, p.S, 1.0f, simdgroup_, lane);
}
