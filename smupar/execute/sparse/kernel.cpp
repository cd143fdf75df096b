// Products of a sparse matrix W, (out, in), with activations, (tokens, features).
//
// A tile of tokens is transposed into a scratch of shape (features, tokens), which stays in the core's second-level cache. For
// each non-zero, one short row of the scratch is loaded, and its product is added in registers. The loads take most of the
// time, so the backward pass uses each loaded row of the output's gradient twice: for the gradient of the input and for that of
// the weight. Activations are read from memory once and written once. Tokens are divided among threads, and sums are made in a
// fixed order, so the result has the same bits each time.

#include <algorithm>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <new>
#include <type_traits>
#include <utility>

#include <unistd.h>
#if defined(__AVX512F__)
#include <immintrin.h>
#endif

namespace {

// The widest vectors that the processor has. The compiler would keep wider ones in memory.
#if defined(__AVX512F__)
constexpr int kVectorBytes = 64;
#elif defined(__AVX__)
constexpr int kVectorBytes = 32;
#else
constexpr int kVectorBytes = 16;
#endif

template <typename T>
struct Simd {
  static constexpr int lanes = kVectorBytes / sizeof(T);
  typedef T vector __attribute__((vector_size(kVectorBytes)));
  typedef std::conditional_t<sizeof(T) == 4, int32_t, int64_t> place;
  typedef place places __attribute__((vector_size(kVectorBytes)));
  typedef T unaligned __attribute__((vector_size(kVectorBytes), aligned(alignof(T)), may_alias));
};

template <typename T>
using Vec = typename Simd<T>::vector;

template <typename T>
inline Vec<T> load(const T* from) {
  return *reinterpret_cast<const typename Simd<T>::unaligned*>(from);
}

template <typename T>
inline void store(T* to, Vec<T> value) {
  *reinterpret_cast<typename Simd<T>::unaligned*>(to) = value;
}

// Exchanges the off-diagonal quarters of every 2s x 2s block of rows i and i + s.
template <typename T, int s, int... j>
inline void exchange(Vec<T>& a, Vec<T>& b, std::integer_sequence<int, j...>) {
  constexpr int n = Simd<T>::lanes;
#if defined(__clang__) || __GNUC__ >= 12
  const Vec<T> low = __builtin_shufflevector(a, b, ((j & s) ? n + j - s : j)...);
  const Vec<T> high = __builtin_shufflevector(a, b, ((j & s) ? n + j : j + s)...);
#else
  const Vec<T> low = __builtin_shuffle(a, b, typename Simd<T>::places{((j & s) ? n + j - s : j)...});
  const Vec<T> high = __builtin_shuffle(a, b, typename Simd<T>::places{((j & s) ? n + j : j + s)...});
#endif
  a = low;
  b = high;
}

template <typename T, int s>
inline void exchange(Vec<T>& a, Vec<T>& b) {
  exchange<T, s>(a, b, std::make_integer_sequence<int, Simd<T>::lanes>());
}

template <typename T, int s = Simd<T>::lanes / 2>
inline void transpose(Vec<T>* rows) {
  if constexpr (s > 0) {
    for (int i = 0; i < Simd<T>::lanes; ++i)
      if (!(i & s)) exchange<T, s>(rows[i], rows[i + s]);
    transpose<T, s / 2>(rows);
  }
}

// Lane i of the result is the sum of the lanes of rows[i].
template <typename T, int s = Simd<T>::lanes / 2>
inline Vec<T> sums(Vec<T>* rows) {
  if constexpr (s == 0) {
    return rows[0];
  } else {
    for (int i = 0; i < s; ++i) {
      exchange<T, s>(rows[i], rows[i + s]);
      rows[i] += rows[i + s];
    }
    return sums<T, s / 2>(rows);
  }
}

// Transposes ``count`` features of the activations, from ``first`` on, into the tile. Places without a token are zero.
template <typename T, int num_vectors>
void turn_in(const T* x, int64_t features, int64_t tokens, int64_t first, int64_t count, Vec<T>* tile) {
  constexpr int n = Simd<T>::lanes;
  alignas(kVectorBytes) T padded[n];
  for (int64_t f = 0; f < count; f += n) {
    const int64_t wide = std::min<int64_t>(n, count - f);
    for (int v = 0; v < num_vectors; ++v) {
      Vec<T> rows[n];
      for (int i = 0; i < n; ++i) {
        const int64_t token = v * n + i;
        if (token >= tokens) {
          rows[i] = Vec<T>{};
        } else if (wide == n) {
          rows[i] = load(x + token * features + first + f);
        } else {
          std::memset(padded, 0, sizeof padded);
          std::memcpy(padded, x + token * features + first + f, wide * sizeof(T));
          rows[i] = load(padded);
        }
      }
      transpose<T>(rows);
      for (int i = 0; i < wide; ++i) tile[(f + i) * num_vectors + v] = rows[i];
    }
  }
}

// Transposes back ``wide`` features, from ``first`` on. ``wide`` is at most the length of a vector.
template <typename T, int num_vectors>
void turn_out(const Vec<T>* block, int64_t wide, T* y, int64_t features, int64_t tokens, int64_t first) {
  constexpr int n = Simd<T>::lanes;
  for (int v = 0; v < num_vectors; ++v) {
    Vec<T> rows[n];
    for (int i = 0; i < n; ++i) rows[i] = block[i * num_vectors + v];
    transpose<T>(rows);
    const int64_t here = std::min<int64_t>(n, tokens - v * n);
    for (int64_t i = 0; i < here; ++i) {
      T* to = y + (v * n + i) * features + first;
      if (wide == n) {
        store(to, rows[i]);
      } else {
        std::memcpy(to, &rows[i], wide * sizeof(T));
      }
    }
  }
}

template <typename T>
struct Scratch {
  explicit Scratch(int64_t count) {
    const size_t bytes = (std::max<int64_t>(count, 1) * sizeof(T) + kVectorBytes - 1) / kVectorBytes * kVectorBytes;
    data = static_cast<T*>(std::aligned_alloc(kVectorBytes, bytes));
    if (data == nullptr) throw std::bad_alloc();
  }
  ~Scratch() { std::free(data); }
  Scratch(const Scratch&) = delete;
  Scratch& operator=(const Scratch&) = delete;
  T* data;
};

// The non-zeros, line by line. Lines are the rows or the columns of W. ``starts`` says where each line starts; ``others`` has
// the position of each non-zero in its line. Packed layers have smaller types for positions and values.
template <typename Value, typename Place = int32_t>
struct Lines {
  const int64_t* starts;
  const Place* others;
  const Value* values;
};

struct Sizes {
  int64_t tokens, in, out;
};

// y = x W' + bias for one tile of tokens. ``lines`` has a line for each output.
template <typename T, int num_vectors, typename Lines>
void forward_tile(const T* x, const T* bias, Sizes sizes, Lines lines, T* y, Vec<T>* tile) {
  constexpr int n = Simd<T>::lanes;
  constexpr int chains = std::max(1, 4 / num_vectors);  // independent sums, since an addition takes four cycles
  turn_in<T, num_vectors>(x, sizes.in, sizes.tokens, 0, sizes.in, tile);
  Vec<T> block[n * num_vectors] = {};
  for (int64_t first = 0; first < sizes.out; first += n) {
    const int64_t wide = std::min<int64_t>(n, sizes.out - first);
    for (int64_t i = 0; i < wide; ++i) {
      const T start = bias == nullptr ? T(0) : bias[first + i];
      Vec<T> sum[chains][num_vectors] = {};
      for (int v = 0; v < num_vectors; ++v) sum[0][v] += start;
      const auto add = [&](int64_t k, Vec<T>* to) {
        const Vec<T>* from = tile + static_cast<int64_t>(lines.others[k]) * num_vectors;
        const T weight = static_cast<T>(lines.values[k]);
        for (int v = 0; v < num_vectors; ++v) to[v] += weight * from[v];
      };
      int64_t k = lines.starts[first + i];
      const int64_t end = lines.starts[first + i + 1];
      for (; k + chains <= end; k += chains)
        for (int c = 0; c < chains; ++c) add(k + c, sum[c]);
      for (; k < end; ++k) add(k, sum[0]);
      for (int c = 1; c < chains; ++c)
        for (int v = 0; v < num_vectors; ++v) sum[0][v] += sum[c][v];
      for (int v = 0; v < num_vectors; ++v) block[i * num_vectors + v] = sum[0][v];
    }
    turn_out<T, num_vectors>(block, wide, y, sizes.out, sizes.tokens, first);
  }
}

// Both gradients for one tile of tokens. ``lines`` has a line for each input. Gradients of the values are added to
// ``grad_values``.
template <typename T, int num_vectors, bool for_input, bool for_values>
void backward_tile(const T* grad_y, const T* x, Sizes sizes, Lines<T> lines, T* grad_x, T* grad_values, Vec<T>* tile) {
  constexpr int n = Simd<T>::lanes;
  turn_in<T, num_vectors>(grad_y, sizes.out, sizes.tokens, 0, sizes.out, tile);
  Vec<T> block[n * num_vectors] = {};
  Vec<T> inputs[n * num_vectors] = {};
  Vec<T> products[n];  // products of non-zeros whose lanes are not summed yet
  int64_t waiting = 0, written = 0;
  for (int64_t first = 0; first < sizes.in; first += n) {
    const int64_t wide = std::min<int64_t>(n, sizes.in - first);
    if constexpr (for_values) turn_in<T, num_vectors>(x, sizes.in, sizes.tokens, first, wide, inputs);
    for (int64_t i = 0; i < wide; ++i) {
      Vec<T> sum[num_vectors] = {};
      Vec<T> input[num_vectors];
      for (int v = 0; v < num_vectors; ++v) input[v] = inputs[i * num_vectors + v];
      const int64_t end = lines.starts[first + i + 1];
      for (int64_t k = lines.starts[first + i]; k < end; ++k) {
        const Vec<T>* from = tile + static_cast<int64_t>(lines.others[k]) * num_vectors;
        const T weight = lines.values[k];
        Vec<T> product = {};
        for (int v = 0; v < num_vectors; ++v) {
          const Vec<T> loaded = from[v];
          if constexpr (for_input) sum[v] += weight * loaded;
          if constexpr (for_values) product += input[v] * loaded;
        }
        if constexpr (for_values) {
          products[waiting++] = product;
          if (waiting == n) {
            store(grad_values + written, load(grad_values + written) + sums<T>(products));
            written += n;
            waiting = 0;
          }
        }
      }
      for (int v = 0; v < num_vectors; ++v) block[i * num_vectors + v] = sum[v];
    }
    if constexpr (for_input) turn_out<T, num_vectors>(block, wide, grad_x, sizes.in, sizes.tokens, first);
  }
  for (int64_t i = 0; i < waiting; ++i)
    for (int lane = 0; lane < n; ++lane) grad_values[written + i] += products[i][lane];
}

template <typename T, int num_vectors, typename Lines>
void forward_tiles(const T* x, const T* bias, Sizes sizes, Lines lines, T* y, int num_threads) {
  constexpr int64_t size = int64_t(num_vectors) * Simd<T>::lanes;
  const int64_t num_tiles = (sizes.tokens + size - 1) / size;
#pragma omp parallel num_threads(num_threads)
  {
    Scratch<Vec<T>> tile(sizes.in * num_vectors);
#pragma omp for schedule(dynamic)
    for (int64_t i = 0; i < num_tiles; ++i) {
      const int64_t first = i * size;
      const Sizes own = {std::min(size, sizes.tokens - first), sizes.in, sizes.out};
      forward_tile<T, num_vectors>(x + first * sizes.in, bias, own, lines, y + first * sizes.out, tile.data);
    }
  }
}

template <typename T, int num_vectors, bool for_input, bool for_values>
void backward_tiles(const T* grad_y, const T* x, Sizes sizes, Lines<T> lines, T* grad_x, T* grad_values, int num_threads) {
  constexpr int64_t size = int64_t(num_vectors) * Simd<T>::lanes;
  const int64_t num_tiles = (sizes.tokens + size - 1) / size, num_values = lines.starts[sizes.in];
  // Each part sums over its own tokens. Then the sums of all parts are added in a fixed order.
  const int num_parts = static_cast<int>(std::max<int64_t>(1, std::min<int64_t>(num_threads, num_tiles)));
  const int64_t room = (num_values + Simd<T>::lanes - 1) / Simd<T>::lanes * Simd<T>::lanes;
  Scratch<T> partial(for_values ? room * num_parts : 1);
#pragma omp parallel num_threads(num_parts)
  {
    Scratch<Vec<T>> tile(sizes.out * num_vectors);
#pragma omp for schedule(static)
    for (int part = 0; part < num_parts; ++part) {
      T* sums = partial.data + part * room;
      if constexpr (for_values) std::memset(sums, 0, room * sizeof(T));
      for (int64_t i = num_tiles * part / num_parts; i < num_tiles * (part + 1) / num_parts; ++i) {
        const int64_t first = i * size;
        const Sizes own = {std::min(size, sizes.tokens - first), sizes.in, sizes.out};
        backward_tile<T, num_vectors, for_input, for_values>(grad_y + first * sizes.out, x + first * sizes.in, own, lines,
                                                             for_input ? grad_x + first * sizes.in : nullptr, sums, tile.data);
      }
    }
    if constexpr (for_values) {
#pragma omp for schedule(static)
      for (int64_t k = 0; k < num_values; ++k) {
        T total = 0;
        for (int part = 0; part < num_parts; ++part) total += partial.data[part * room + k];
        grad_values[k] = total;
      }
    }
  }
}

// The largest size of the scratch. A quarter of a core's second-level cache was fastest.
int64_t scratch_bytes() {
  long size = 0;
#ifdef _SC_LEVEL2_CACHE_SIZE
  size = sysconf(_SC_LEVEL2_CACHE_SIZE);
#endif
  return (size > 0 ? size : 1 << 20) / 4;
}

// Calls ``with`` with the number of vectors of tokens in a tile: the largest for which the scratch stays in the cache and every
// thread gets a tile.
template <typename T, int num_vectors = 8, typename With>
void with_tile(int64_t features, int64_t tokens, int num_threads, With with) {
  static const int64_t cache = scratch_bytes();
  if constexpr (num_vectors > 1) {
    const bool too_large = features * num_vectors * kVectorBytes > cache;
    if (too_large || int64_t(num_vectors) * Simd<T>::lanes * num_threads > tokens)
      return with_tile<T, num_vectors / 2>(features, tokens, num_threads, with);
  }
  with(std::integral_constant<int, num_vectors>());
}

template <typename T, typename Lines>
void forward(const T* x, const T* bias, Sizes sizes, Lines lines, T* y, int num_threads) {
  with_tile<T>(sizes.in, sizes.tokens, num_threads, [&](auto num_vectors) {
    forward_tiles<T, num_vectors.value>(x, bias, sizes, lines, y, num_threads);
  });
}

template <typename T>
void backward(const T* grad_y, const T* x, Sizes sizes, Lines<T> lines, T* grad_x, T* grad_values, int num_threads) {
  with_tile<T>(sizes.out, sizes.tokens, num_threads, [&](auto num_vectors) {
    constexpr int num = num_vectors.value;
    if (grad_x != nullptr && grad_values != nullptr)
      backward_tiles<T, num, true, true>(grad_y, x, sizes, lines, grad_x, grad_values, num_threads);
    else if (grad_x != nullptr)
      backward_tiles<T, num, true, false>(grad_y, x, sizes, lines, grad_x, grad_values, num_threads);
    else if (grad_values != nullptr)
      backward_tiles<T, num, false, true>(grad_y, x, sizes, lines, grad_x, grad_values, num_threads);
  });
}

// Packed layers, for decoding: 2 bytes for a position, 2 or 4 for a value. Reading W, once for each token of a text, takes most
// of the time.

// A bfloat16 number, which is the upper half of a float.
struct BFloat16 {
  uint16_t bits;
  explicit operator float() const {
    const uint32_t wide = uint32_t(bits) << 16;
    float value;
    std::memcpy(&value, &wide, sizeof value);
    return value;
  }
  static BFloat16 rounded(float value) {
    uint32_t wide;
    std::memcpy(&wide, &value, sizeof wide);
    if (value != value) return {uint16_t(wide >> 16 | 0x40)};
    return {uint16_t((wide + 0x7fff + ((wide >> 16) & 1)) >> 16)};  // rounds to the nearest, ties to even, as torch does
  }
};

constexpr int kFewTokens = 4;  // up to this number, tokens are multiplied one by one, since a tile would be mostly empty

#if defined(__AVX512F__)
inline __m512i load16(const uint16_t* from) {
  return _mm512_maskz_cvtepu16_epi32(0xffff, _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from)));
}
inline __m512 load16(const BFloat16* from) {
  return _mm512_castsi512_ps(_mm512_slli_epi32(load16(reinterpret_cast<const uint16_t*>(from)), 16));
}
inline __m512 load16(const float* from) { return _mm512_loadu_ps(from); }

// The product of a row of W with the activations of one token. Reads up to 15 positions and values after the last.
template <typename Value>
inline float dot(const Value* values, const uint16_t* places, int64_t count, const float* x) {
  __m512 sum = _mm512_setzero_ps();
  for (int64_t k = 0; k < count; k += 16) {
    const __mmask16 there = count - k >= 16 ? 0xffff : (1u << (count - k)) - 1;
    const __m512 from = _mm512_mask_i32gather_ps(_mm512_setzero_ps(), there, load16(places + k), x, sizeof(float));
    sum = _mm512_fmadd_ps(_mm512_maskz_mov_ps(there, load16(values + k)), from, sum);
  }
  return _mm512_reduce_add_ps(sum);
}
#else
template <typename Value>
inline float dot(const Value* values, const uint16_t* places, int64_t count, const float* x) {
  float sums[4] = {};
  int64_t k = 0;
  for (; k + 4 <= count; k += 4)
    for (int c = 0; c < 4; ++c) sums[c] += static_cast<float>(values[k + c]) * x[places[k + c]];
  for (; k < count; ++k) sums[0] += static_cast<float>(values[k]) * x[places[k]];
  return (sums[0] + sums[1]) + (sums[2] + sums[3]);
}
#endif

template <typename Value>
void packed(const float* x, const float* bias, Sizes sizes, Lines<Value, uint16_t> lines, float* y, int num_threads) {
  if (sizes.tokens > kFewTokens) return forward<float>(x, bias, sizes, lines, y, num_threads);
#pragma omp parallel for num_threads(num_threads) schedule(static) if (num_threads > 1)
  for (int64_t row = 0; row < sizes.out; ++row) {
    const int64_t first = lines.starts[row], count = lines.starts[row + 1] - first;
    for (int64_t token = 0; token < sizes.tokens; ++token)
      y[token * sizes.out + row] = (bias == nullptr ? 0.0f : bias[row]) +
                                   dot(lines.values + first, lines.others + first, count, x + token * sizes.in);
  }
}

// Activations in bfloat16, sums in fp32.
void packed(const BFloat16* x, const float* bias, Sizes sizes, Lines<BFloat16, uint16_t> lines, BFloat16* y, int num_threads) {
  const int64_t num_in = sizes.tokens * sizes.in, num_out = sizes.tokens * sizes.out;
  Scratch<float> wide(num_in + num_out);
  for (int64_t i = 0; i < num_in; ++i) wide.data[i] = static_cast<float>(x[i]);
  packed<BFloat16>(wide.data, bias, sizes, lines, wide.data + num_in, num_threads);
  for (int64_t i = 0; i < num_out; ++i) y[i] = BFloat16::rounded(wide.data[num_in + i]);
}

}  // namespace

// The interface is plain C, so that no header of torch or Python is needed and compiling takes seconds.
#define SMUPAR_KERNELS(T, suffix)                                                                                        \
  extern "C" void smupar_forward_##suffix(const T* x, int64_t tokens, int64_t in, int64_t out, const int64_t* starts,    \
                                          const int32_t* others, const T* values, const T* bias, T* y, int num_threads) { \
    forward<T>(x, bias, {tokens, in, out}, Lines<T>{starts, others, values}, y, num_threads);                                 \
  }                                                                                                                      \
  extern "C" void smupar_backward_##suffix(const T* grad_y, const T* x, int64_t tokens, int64_t in, int64_t out,         \
                                           const int64_t* starts, const int32_t* others, const T* values, T* grad_x,     \
                                           T* grad_values, int num_threads) {                                            \
    backward<T>(grad_y, x, {tokens, in, out}, {starts, others, values}, grad_x, grad_values, num_threads);               \
  }

SMUPAR_KERNELS(float, f32)
SMUPAR_KERNELS(double, f64)

#define SMUPAR_PACKED(T, suffix)                                                                                       \
  extern "C" void smupar_packed_##suffix(const T* x, int64_t tokens, int64_t in, int64_t out, const int64_t* starts,   \
                                         const uint16_t* others, const T* values, const float* bias, T* y,             \
                                         int num_threads) {                                                            \
    packed(x, bias, {tokens, in, out}, Lines<T, uint16_t>{starts, others, values}, y, num_threads);                     \
  }

SMUPAR_PACKED(float, f32)
SMUPAR_PACKED(BFloat16, bf16)
