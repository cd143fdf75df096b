// Products with a matrix of any mask. A block of threads holds TOK rows of the activations in shared memory, transposed, so
// that a non-zero finds what it is multiplied by in neighbouring words. WARPS warps go through the lines of the matrix, which
// `sliced_ell` in tiles.py lays out. For `pack`, F32 is 1 if values are float, and 0 if they are bfloat16. bf16.cuh comes
// before this file.

#ifdef F32
// An entry of the matrix has the value in the upper half, and the position in the line in the lower half. Padding has source
// -1.
#if F32
extern "C" __global__ void pack(const float* values, const int* source, const u16* columns, u32* entries, int num) {
#else
extern "C" __global__ void pack(const u16* values, const int* source, const u16* columns, u32* entries, int num) {
#endif
  const int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i >= num) return;
  const int from = source[i];
#if F32
  const u32 value = from < 0 ? 0 : rounded(values[from]);
#else
  const u32 value = from < 0 ? 0 : values[from];
#endif
  entries[i] = value << 16 | columns[i];
}
#endif

#ifdef TOK
#define LANES (TOK / 8)     // lanes that share a line of the matrix, eight tokens each: one load of 16 bytes
#define LINES (32 / LANES)  // lines that a warp works on at once
#define GROUPS (32 / LINES)
#define WORDS (TOK / 2)     // 32-bit words of a feature in the tile
#define STRIDE 72           // bytes of a token in the stage: 32 lines and a gap that spreads banks

__device__ __forceinline__ float low(u32 w) { return __uint_as_float(w << 16); }
__device__ __forceinline__ float high(u32 w) { return __uint_as_float(w & 0xffff0000u); }

// Transposes [tokens, features] in memory to [features][TOK tokens] in shared memory, with two tokens in a word.
__device__ __forceinline__ void load_tile(const u16* X, u32* tile, int t0, int end, int features) {
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, warps = blockDim.x >> 5;
  const int pair = lane % WORDS, run = lane / WORDS, t = t0 + 2 * pair;  // 32 / WORDS runs of 8 features at once
  const u16* r0 = X + (long long)t * features;
  const u16* r1 = r0 + features;
  const bool has0 = t < end, has1 = t + 1 < end;
  const uint4 zero = make_uint4(0, 0, 0, 0);
  for (int f = (warp * (32 / WORDS) + run) * 8; f < features; f += warps * (32 / WORDS) * 8) {
    const uint4 a = has0 ? *(const uint4*)(r0 + f) : zero, b = has1 ? *(const uint4*)(r1 + f) : zero;
    const u32 pa[4] = {a.x, a.y, a.z, a.w}, pb[4] = {b.x, b.y, b.z, b.w};
#pragma unroll
    for (int q = 0; q < 4; q++) {
      const u32 even = __byte_perm(pa[q], pb[q], 0x5410), odd = __byte_perm(pa[q], pb[q], 0x7632);
      const int h = run & 1;  // neighbouring runs write odd and even features in turn, so that no bank is used twice
      tile[(f + 2 * q + h) * WORDS + pair] = h ? odd : even;
      tile[(f + 2 * q + 1 - h) * WORDS + pair] = h ? even : odd;
    }
  }
}

extern "C" __global__ void __launch_bounds__(WARPS * 32, 1)
multiply(const u16* X, const uint4* entries, const int* starts, const unsigned char* places, u16* Y, int tokens, int in, int out) {
  extern __shared__ uint4 shared[];
  u32* tile = (u32*)shared;
  const u32 all = 0xffffffffu;
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, warps = blockDim.x >> 5, t0 = blockIdx.x * TOK, blocks = out / 32;
  unsigned char* stage = (unsigned char*)shared + in * TOK * 2 + warp * (TOK * STRIDE);
  const int sub = lane / LANES, part = lane % LANES;
  const unsigned char* mine = (const unsigned char*)tile + part * 16;
  // Entries are read one run ahead, since memory is slow. The first are read before the tile is loaded.
  int block = warp, at = block < blocks ? starts[block * GROUPS + min(lane, GROUPS)] : 0;
  uint4 e = __ldg(entries + __shfl_sync(all, at, 0) + sub);
  load_tile(X, tile, t0, tokens, in);
  __syncthreads();
  for (; block < blocks; block += warps) {
    const int next = block + warps < blocks ? block + warps : block, at_next = starts[next * GROUPS + min(lane, GROUPS)];
    const int place = places[block * 32 + lane];
    int k = __shfl_sync(all, at, 0) + sub;
#pragma unroll 1
    for (int g = 0; g < GROUPS; g++) {
      const int to = __shfl_sync(all, at, g + 1);
      float sums[8] = {0, 0, 0, 0, 0, 0, 0, 0};
#pragma unroll 1
      for (; k < to; k += LINES) {
        const uint4 ahead = __ldg(entries + k + LINES);
        const u32 four[4] = {e.x, e.y, e.z, e.w};
#pragma unroll
        for (int q = 0; q < 4; q++) {
          const uint4 x = *(const uint4*)(mine + (four[q] & 0xffffu) * (TOK * 2));
          const u32 pairs[4] = {x.x, x.y, x.z, x.w};
          const float v = high(four[q]);
#pragma unroll
          for (int i = 0; i < 4; i++) {
            sums[2 * i] = fmaf(v, low(pairs[i]), sums[2 * i]);
            sums[2 * i + 1] = fmaf(v, high(pairs[i]), sums[2 * i + 1]);
          }
        }
        e = ahead;
      }
      unsigned char* s = stage + part * 8 * STRIDE + __shfl_sync(all, place, g * LINES + sub) * 2;
#pragma unroll
      for (int i = 0; i < 8; i++) *(u16*)(s + i * STRIDE) = (u16)rounded(sums[i]);
    }
    at = at_next;
    e = __ldg(entries + __shfl_sync(all, at, 0) + sub);
    __syncwarp();
    for (int i = lane; i < TOK * 8; i += 32) {
      const int token = i >> 3, piece = i & 7;
      if (t0 + token < tokens)
        *(uint2*)(Y + (long long)(t0 + token) * out + block * 32 + piece * 4) = *(const uint2*)(stage + token * STRIDE + piece * 8);
    }
    __syncwarp();
  }
}
#endif
