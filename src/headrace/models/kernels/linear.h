// Products with weights as they lie in memory, and what stands beside them in a layer: the phases of calls.
//
// Batch-invariant: what a token gets is computed by the same operations in the same order whatever other tokens are in
// the call, and however many threads work. Element (m, n) of a product is LANES partial sums, lane l over
// k = l, l + LANES, ..., then one tree over the lanes.
//
// Legend: M tokens, K inputs, N outputs, x [M, K], w [N, K], y [M, N]; ld*: numbers from one row to the next.
#pragma once
#include <algorithm>
#include <cmath>
#include "team.h"
#include "vec.h"

#ifdef __AVX512F__
enum { TOKENS = 3, ROWS = 8 };  // accumulators of a tile: 24 of 32 registers
#else
enum { TOKENS = 2, ROWS = 4 };
#endif
enum { CHUNK = 32, AHEAD = 8 };   // rows of w that a thread takes at once; rows that are fetched ahead of use
enum { SPREAD = 2, LONG = 256 };  // steps of k to a fetch where tokens are many and K is LONG: more hold up reading x
enum { BLOCK = 96, HANDFUL = 8 };  // tokens whose x stays in the second cache; tokens of a task that has no product

struct Input {
  const float* x;
  long ldx, M, K;
};
struct Part {             // one of several products with the same x: y = x wᵀ + bias + add
  const float *w, *bias;  // bias may be null
  const float* add;       // laid as y, may be y or null
  float* y;
  long N, ldy;
};
struct Norm {  // x / rms(x) · (w + plus)
  const float* w;
  float eps, plus;
};

// R tokens and C rows of w. `fetch` lines of w from `ahead` on are fetched every EVERY steps of k; 0: none are.
template <int R, int C, int EVERY>
static void tile(const Input& in, const Part& p, long m, long n, const float* ahead, int fetch) {
  const long K = in.K;
  const float *x = in.x + m * in.ldx, *w = p.w + n * K;
  vec acc[R][C];
  UNROLL for (int i = 0; i < R; i++)
    UNROLL for (int j = 0; j < C; j++) acc[i][j] = vec{};
  long k = 0;
  auto step = [&]() __attribute__((always_inline)) {
    vec a[R];
    UNROLL for (int i = 0; i < R; i++) {
      a[i] = load(x + i * in.ldx + k);
      HOLD(a[i]);
    }
    UNROLL for (int j = 0; j < C; j++) {
      vec b = load(w + j * K + k);
      HOLD(b);
      UNROLL for (int i = 0; i < R; i++) acc[i][j] += a[i] * b;
    }
    k += LANES;
  };
  if (EVERY)
    for (; k + EVERY * LANES <= K;) {
      for (int f = 0; f < fetch; f++, ahead += 16) __builtin_prefetch(ahead, 0, 2);
      UNROLL for (int i = 0; i < EVERY; i++) step();
    }
  while (k + LANES <= K) step();
  if (k < K)
    for (int i = 0; i < R; i++)
      for (int j = 0; j < C; j++) acc[i][j] += load(x + i * in.ldx + k, K - k) * load(w + j * K + k, K - k);
  UNROLL for (int i = 0; i < R; i++) {
    long at = (m + i) * p.ldy + n;
    if (C == 1) {
      float s = sum(acc[i][0]) + (p.bias ? p.bias[n] : 0.0f);
      p.y[at] = p.add ? p.add[at] + s : s;
    } else {
      UNROLL for (int j = 0; j + 4 <= C; j += 4) {
        quad s = sum4(acc[i][j], acc[i][(j + 1) % C], acc[i][(j + 2) % C], acc[i][(j + 3) % C]);
        s += p.bias ? *(const quad*)(p.bias + n + j) : quad{};
        *(quad*)(p.y + at + j) = p.add ? *(const quad*)(p.add + at + j) + s : s;
      }
    }
  }
}

// Tokens [first, last) against C rows of w.
template <int C>
static void rows(const Input& in, const Part& p, long first, long last, long n) {
  const long tiles = (last - first + TOKENS - 1) / TOKENS, every = tiles >= SPREAD * C && in.K >= LONG ? SPREAD : 1;
  const int fetch = (int)((C + tiles - 1) / tiles) * LANES / 16;  // spread over the tiles
  const float *ahead = p.w + (n + AHEAD) * in.K, *end = ahead + C * in.K;
  for (long m = first; m < last;) {
    long count = last - m >= TOKENS ? TOKENS : last - m >= 2 ? 2 : 1, now = ahead < end ? every : 0;
    auto f = count == TOKENS ? (now == SPREAD ? tile<TOKENS, C, SPREAD> : now ? tile<TOKENS, C, 1> : tile<TOKENS, C, 0>)
             : count == 2    ? (now ? tile<2, C, 1> : tile<2, C, 0>)
                             : (now ? tile<1, C, 1> : tile<1, C, 0>);
    f(in, p, m, n, ahead, fetch);
    m += count;
    ahead += now ? fetch * in.K / now : 0;
  }
}

INLINE long chunks(long N) { return (N + CHUNK - 1) / CHUNK; }

// Chunk c of the rows of w.
static void product(const Input& in, const Part& p, long c) {
  long last = std::min<long>(p.N, (c + 1) * CHUNK);
  for (long m = 0; m < in.M; m += BLOCK) {
    long end = std::min<long>(in.M, m + BLOCK), n = c * CHUNK;
    for (; n + ROWS <= last; n += ROWS) rows<ROWS>(in, p, m, end, n);
    for (; n < last; n++) rows<1>(in, p, m, end, n);
  }
}

// Several products with one x.
static void products(Member& me, const Input& in, const Part* parts, long num_parts) {
  long total = 0;
  for (long i = 0; i < num_parts; i++) total += chunks(parts[i].N);
  me.each(total, [&](long c) {
    const Part* p = parts;
    while (c >= chunks(p->N)) c -= chunks(p++->N);
    product(in, *p, c);
  });
}

template <class F>  // a row by vectors; the last one may be shorter
INLINE void by_vectors(long n, F&& f) {
  long i = 0;
  for (; i + LANES <= n; i += LANES) f(i, (long)LANES);  // whole ones, and the compiler knows
  if (i < n) f(i, n - i);
}

template <class F>  // f(m) for every token
INLINE void tokens(Member& me, long M, F&& f) {
  me.each((M + HANDFUL - 1) / HANDFUL, [&](long t) {
    for (long m = t * HANDFUL; m < std::min<long>(M, (t + 1) * HANDFUL); m++) f(m);
  });
}

INLINE vec silu(vec a) { return a / (exp(-a) + 1.0f); }

// down · (silu(gate · x) * (up · x)); the inner values stand in gate.y and up.y.
ONCE void gated(Member& me, const Input& in, const Part& gate, const Part& up, const Part& down) {
  me.each(chunks(gate.N), [&](long c) {
    product(in, gate, c);
    product(in, up, c);
    long first = c * CHUNK, size = std::min<long>(CHUNK, gate.N - first);
    for (long m = 0; m < in.M; m++) {
      float *g = gate.y + m * gate.ldy + first, *u = up.y + m * up.ldy + first;
      by_vectors(size, [&](long i, long n) { store(g + i, silu(load(g + i, n)) * load(u + i, n), n); });
    }
  });
  products(me, {gate.y, gate.ldy, in.M, gate.N}, &down, 1);
}

INLINE float rms(const float* x, long n, float eps) {
  vec squares = {};
  long i = 0;
  for (; i + LANES <= n; i += LANES) squares += load(x + i) * load(x + i);
  if (i < n) squares += load(x + i, n - i) * load(x + i, n - i);
  return 1.0f / std::sqrt(sum(squares) / n + eps);
}

// y may be x.
ONCE void normed(const float* x, const Norm& norm, float* y, long n) {
  float scale = rms(x, n, norm.eps);
  by_vectors(n, [&](long i, long c) { store(y + i, load(x + i, c) * scale * (load(norm.w + i, c) + norm.plus), c); });
}

struct Turn {  // [M, size] each: x cos + (-second half, first half) sin, for the first `size` numbers of a head
  const float *cos, *sin;
  long size;
};

// The heads of one token, of E numbers each, in place: normed (norm.w null: not), then turned.
ONCE void heads(float* head, long num, long E, const Norm& norm, const Turn& turn, long m) {
  const float *c = turn.cos + m * turn.size, *s = turn.sin + m * turn.size;
  long half = turn.size / 2;
  for (float* end = head + num * E; head < end; head += E) {
    if (norm.w) normed(head, norm, head, E);
    by_vectors(half, [&](long i, long n) {
      vec a = load(head + i, n), b = load(head + half + i, n);
      store(head + i, a * load(c + i, n) - b * load(s + i, n), n);
      store(head + half + i, b * load(c + half + i, n) + a * load(s + half + i, n), n);
    });
  }
}

// y = log softmax(x).
INLINE void log_softmax(const float* x, float* y, long n) {
  float most = *std::max_element(x, x + n);
  vec total = {};
  by_vectors(n, [&](long i, long c) {
    vec e = exp(load(x + i, c) - most);
    total += load((const float*)&e, c);  // lanes beyond the row are zeros again
  });
  float away = most + std::log(sum(total));
  for (long i = 0; i < n; i++) y[i] = x[i] - away;
}
