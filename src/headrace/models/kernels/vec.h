// Vectors of floats: the widest the processor has, through the compiler's own extension, so that one text serves all.
#pragma once
#include <cstring>

#define INLINE static inline __attribute__((always_inline))
#define ONCE static __attribute__((noinline))  // one text in the library: the same bits from wherever it is called
#define UNROLL _Pragma("GCC unroll 8")
#define UNROLL16 _Pragma("GCC unroll 16")

#ifdef __AVX512F__
enum { LANES = 16 };
#else
enum { LANES = 8 };
#endif
typedef float vec __attribute__((vector_size(4 * LANES), aligned(4), may_alias));
typedef int ivec __attribute__((vector_size(4 * LANES), aligned(4), may_alias));
typedef float quad __attribute__((vector_size(16), aligned(4), may_alias));

INLINE vec load(const float* p) { return *(const vec*)p; }
INLINE void store(float* p, vec a) { *(vec*)p = a; }
INLINE vec all(float a) { return a - vec{}; }

// Held in a register: a compiler would rather read it from memory again at each use.
#if defined(__AVX512F__)
#define HOLD(a) asm("" : "+v"(a))
#elif defined(__AVX__)
#define HOLD(a) asm("" : "+x"(a))
#else
#define HOLD(a)
#endif

// The first n lanes; the others are zeros. Whole vectors do not go through memcpy, which takes them through memory.
INLINE vec load(const float* p, long n) {
  if (n >= LANES) return load(p);
  vec a = {};
  memcpy(&a, p, 4 * n);
  return a;
}
INLINE void store(float* p, vec a, long n) {
  if (n >= LANES) store(p, a);
  else memcpy(p, &a, 4 * n);
}

INLINE vec max(vec a, vec b) { return a > b ? a : b; }

// What weights, tokens and the cache are: `number`. `pairs` hold the numbers that one instruction multiplies, PAIR of
// neighbouring k in a lane.
#ifdef BFLOAT16
#include "bfloat16.h"
#else
typedef float number;
typedef vec pairs;
enum { PAIR = 1, DOT_PRODUCTS = 0 };
INLINE float wide(number a) { return a; }
INLINE vec rounded(vec a) { return a; }
INLINE pairs load_pairs(const number* p) { return load(p); }
INLINE pairs load_pairs(const number* p, long n) { return load(p, n); }
INLINE pairs all_pairs(const number* p, long n = PAIR) { return all(*p); }
INLINE vec add_products(vec sum, pairs a, pairs b) { return sum + a * b; }
#endif
enum { LINE = 64 / sizeof(number) };  // numbers of a line of the cache

template <class F>  // a row by vectors; the last one may be shorter
INLINE void by_vectors(long n, F&& f) {
  long i = 0;
  for (; i + LANES <= n; i += LANES) f(i, (long)LANES);  // whole ones, and the compiler knows
  if (i < n) f(i, n - i);
}

// One from each in turn: of the first halves, of the second halves.
#define MIX __builtin_shufflevector
INLINE vec zip_low(vec a, vec b) {
#if defined(__AVX512F__)
  return MIX(a, b, 0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23);
#else
  return MIX(a, b, 0, 8, 1, 9, 2, 10, 3, 11);
#endif
}
INLINE vec zip_high(vec a, vec b) {
#if defined(__AVX512F__)
  return MIX(a, b, 8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31);
#else
  return MIX(a, b, 4, 12, 5, 13, 6, 14, 7, 15);
#endif
}

// Four sums over lanes at once. Each lane's way through the tree is the same in all four places.
INLINE quad sum4(vec a, vec b, vec c, vec d) {
#if defined(__AVX512F__)
  vec ab = MIX(a, b, 0, 16, 1, 17, 4, 20, 5, 21, 8, 24, 9, 25, 12, 28, 13, 29) +
           MIX(a, b, 2, 18, 3, 19, 6, 22, 7, 23, 10, 26, 11, 27, 14, 30, 15, 31);
  vec cd = MIX(c, d, 0, 16, 1, 17, 4, 20, 5, 21, 8, 24, 9, 25, 12, 28, 13, 29) +
           MIX(c, d, 2, 18, 3, 19, 6, 22, 7, 23, 10, 26, 11, 27, 14, 30, 15, 31);
  vec s = MIX(ab, cd, 0, 1, 16, 17, 4, 5, 20, 21, 8, 9, 24, 25, 12, 13, 28, 29) +
          MIX(ab, cd, 2, 3, 18, 19, 6, 7, 22, 23, 10, 11, 26, 27, 14, 15, 30, 31);
  auto h = MIX(s, s, 0, 1, 2, 3, 4, 5, 6, 7) + MIX(s, s, 8, 9, 10, 11, 12, 13, 14, 15);
#else
  vec ab = MIX(a, b, 0, 8, 1, 9, 4, 12, 5, 13) + MIX(a, b, 2, 10, 3, 11, 6, 14, 7, 15);
  vec cd = MIX(c, d, 0, 8, 1, 9, 4, 12, 5, 13) + MIX(c, d, 2, 10, 3, 11, 6, 14, 7, 15);
  vec h = MIX(ab, cd, 0, 1, 8, 9, 4, 5, 12, 13) + MIX(ab, cd, 2, 3, 10, 11, 6, 7, 14, 15);
#endif
  return MIX(h, h, 0, 1, 2, 3) + MIX(h, h, 4, 5, 6, 7);
}
INLINE float sum(vec a) { return sum4(a, a, a, a)[0]; }

INLINE float largest(vec a) {
  float lanes[LANES];
  store(lanes, a);
  for (int half = LANES / 2; half; half /= 2)
    for (int i = 0; i < half; i++) lanes[i] = lanes[i] > lanes[i + half] ? lanes[i] : lanes[i + half];
  return lanes[0];
}

// e^a: a = n ln 2 + r, a polynomial of r in [-ln 2 / 2, ln 2 / 2] (Cephes), n into the exponent. Relative error 1e-7;
// 0 below e^-87, e^88 above it; a NaN stays one.
INLINE vec exp(vec a) {
  vec x = a < -87.0f ? all(-87.0f) : a;
  x = x > 88.0f ? all(88.0f) : x;
  vec shifted = x * 1.44269504088896341f + 12582912.0f;  // 1.5 · 2^23: rounds to an integer, held in the low bits
  vec n = shifted - 12582912.0f;
  vec r = x - n * 0.693359375f;
  r = r - n * -2.12194440e-4f;
  vec p = r * 1.9875691500e-4f + 1.3981999507e-3f;
  p = p * r + 8.3334519073e-3f;
  p = p * r + 4.1665795894e-2f;
  p = p * r + 1.6666665459e-1f;
  p = p * r + 5.0000001201e-1f;
  p = p * (r * r) + r + 1.0f;
  ivec power = ((ivec)shifted + 127) << 23;  // what stands above the low bits of the 1.5 · 2^23 is shifted out
  return a < -87.0f ? vec{} : p * (vec)power;
}
