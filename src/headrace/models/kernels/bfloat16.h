// Numbers in bfloat16, the upper halves of float32: weights, tokens and the cache of a library that is compiled with
// BFLOAT16. Sums are float32. A lane holds two numbers of neighbouring k, whose products are added to one sum.
#pragma once
#ifdef __AVX512F__
#include <immintrin.h>
#endif

struct number {  // not a type of the compiler's: nothing is computed in bfloat16 by accident
  unsigned short bits;
};
enum { PAIR = 2 };
#ifdef __AVX512BF16__
enum { DOT_PRODUCTS = 1 };
#else
enum { DOT_PRODUCTS = 0 };  // pairs are multiplied as float32
#endif
typedef unsigned uvec __attribute__((vector_size(4 * LANES), aligned(4), may_alias));
typedef unsigned pairs __attribute__((vector_size(4 * LANES), aligned(2), may_alias));
typedef unsigned short halves __attribute__((vector_size(2 * LANES), aligned(2), may_alias));

INLINE vec widen(halves a) {
#ifdef __AVX512F__
  return (vec)_mm512_slli_epi32(_mm512_cvtepu16_epi32((__m256i)a), 16);  // a compiler would widen half by half
#else
  return (vec)(__builtin_convertvector(a, uvec) << 16);
#endif
}
INLINE float wide(number a) {
  const unsigned bits = a.bits << 16;
  float all;
  memcpy(&all, &bits, 4);
  return all;
}

// To the nearest number, of two as near to the even one. A NaN stays one.
INLINE halves narrowed(vec a) {
#ifdef __AVX512BF16__
  return (halves)_mm512_cvtneps_pbh((__m512)a);
#else
  const uvec bits = (uvec)a, nearest = bits + 0x7fff + ((bits >> 16) & 1);
  return __builtin_convertvector((a == a ? nearest : (bits | 0x400000)) >> 16, halves);
#endif
}
INLINE vec rounded(vec a) { return widen(narrowed(a)); }

INLINE vec load(const number* p) { return widen(*(const halves*)p); }
INLINE void store(number* p, vec a) { *(halves*)p = narrowed(a); }
INLINE vec load(const number* p, long n) {
  if (n >= LANES) return load(p);
  halves a = {};
  memcpy(&a, p, 2 * n);
  return widen(a);
}
INLINE void store(number* p, vec a, long n) {
  if (n >= LANES) return store(p, a);
  const halves b = narrowed(a);
  memcpy(p, &b, 2 * n);
}

INLINE pairs load_pairs(const number* p) { return *(const pairs*)p; }
INLINE pairs load_pairs(const number* p, long n) {
  if (n >= PAIR * LANES) return load_pairs(p);
  pairs a = {};
  memcpy(&a, p, 2 * n);
  return a;
}
INLINE pairs all_pairs(const number* p, long n = PAIR) {
  unsigned both = 0;
  memcpy(&both, p, 2 * n);
  return both - pairs{};
}

INLINE vec add_products(vec sum, pairs a, pairs b) {
#ifdef __AVX512BF16__
  return (vec)_mm512_dpbf16_ps((__m512)sum, (__m512bh)a, (__m512bh)b);
#else
  const unsigned upper = 0xffff0000;
  return sum + (vec)(a << 16) * (vec)(b << 16) + (vec)(a & upper) * (vec)(b & upper);
#endif
}
