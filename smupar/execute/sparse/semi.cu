// Moves values for a 2:4 product. In each tile of 4 x 4 weights, two are kept in each row and each column. A code of 16 bits
// says which: bit 4 r + c is for row r and column c. The two values of a tile's row are one 32-bit word in bfloat16. If F32 is
// 1, the values of the parameter are float, else bfloat16. bf16.cuh comes before this file.

#if F32
typedef float2 Pair;
#else
typedef u32 Pair;
#endif

__device__ __forceinline__ u32 word(Pair pair) {
#if F32
  return rounded(pair.x) | rounded(pair.y) << 16;
#else
  return pair;
#endif
}

__device__ __forceinline__ Pair pair(u32 first, u32 second) {
#if F32
  return make_float2(__uint_as_float(first << 16), __uint_as_float(second << 16));
#else
  return first | second << 16;
#endif
}

// Turns the values of a matrix of row_tiles x column_tiles tiles, row by row, into those of its transpose, in bfloat16. A block
// of threads takes 32 x 32 tiles and transposes them in shared memory, so that it reads and writes neighbouring words.
extern "C" __global__ void __launch_bounds__(256)
turn(const Pair* values, const u16* codes, u32* turned, int row_tiles, int column_tiles) {
  __shared__ u32 stage[4][32][33];  // [row in the tile of the transpose][column tile][row tile]
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
  const int row0 = blockIdx.y * 32, column0 = blockIdx.x * 32, column = column0 + lane;
  for (int i = warp; i < 32; i += 8) {
    const int row = row0 + i;
    if (row >= row_tiles || column >= column_tiles) continue;
    const u32 code = codes[(long long)row * column_tiles + column];
    u32 words[4], first = 0, made[4] = {0, 0, 0, 0};  // first: rows whose first value was taken
    const Pair* from = values + (long long)row * 4 * column_tiles + column;
#pragma unroll
    for (int r = 0; r < 4; r++) words[r] = word(from[(long long)r * column_tiles]);
#pragma unroll
    for (int c = 0; c < 4; c++) {
      u32 shift = 0;
#pragma unroll
      for (int r = 0; r < 4; r++) {
        if (code >> (4 * r + c) & 1) {
          const u32 value = first >> r & 1 ? words[r] >> 16 : words[r] & 0xffffu;
          made[c] |= value << shift;
          shift = 16;
          first |= 1u << r;
        }
      }
    }
#pragma unroll
    for (int c = 0; c < 4; c++) stage[c][lane][i] = made[c];
  }
  __syncthreads();
  for (int i = warp; i < 128; i += 8) {
    const int c = i & 3, tile = i >> 2;
    if (column0 + tile < column_tiles && row0 + lane < row_tiles)
      turned[((long long)(column0 + tile) * 4 + c) * row_tiles + row0 + lane] = stage[c][tile][lane];
  }
}

// Picks the kept entries of a full matrix in bfloat16, row by row, and writes them in the dtype of the parameter. Each thread
// takes one tile.
extern "C" __global__ void __launch_bounds__(256)
pick(const uint2* matrix, const u16* codes, Pair* values, int row_tiles, int column_tiles) {
  const int column = blockIdx.x * 256 + threadIdx.x;
  if (column >= column_tiles) return;
  for (int row = blockIdx.y; row < row_tiles; row += gridDim.y) {
    const u32 code = codes[(long long)row * column_tiles + column];
    const long long at = (long long)row * 4 * column_tiles + column;
#pragma unroll
    for (int r = 0; r < 4; r++) {
      const uint2 four = matrix[at + (long long)r * column_tiles];
      const u32 kept = code >> (4 * r) & 15u;
      const u32 all[4] = {four.x & 0xffffu, four.x >> 16, four.y & 0xffffu, four.y >> 16};
      u32 low = 0, high = 0;
#pragma unroll
      for (int c = 3; c >= 0; c--)  // the last assignment is that of the first kept entry
        if (kept >> c & 1) low = all[c];
#pragma unroll
      for (int c = 0; c < 4; c++)
        if (kept >> c & 1) high = all[c];
      values[at + (long long)r * column_tiles] = pair(low, high);
    }
  }
}
