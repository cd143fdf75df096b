// gpu.py puts this file in front of every CUDA source of this folder. A bfloat16 is the upper half of a float.

typedef unsigned short u16;
typedef unsigned int u32;

__device__ __forceinline__ u32 rounded(float x) {
  const u32 w = __float_as_uint(x);
  if ((w & 0x7fffffffu) > 0x7f800000u) return 0x7fff;  // NaN, which rounding could turn into a number
  return (w + 0x7fffu + ((w >> 16) & 1u)) >> 16;
}
