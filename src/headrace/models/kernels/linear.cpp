// Products with weights as they lie in memory, and what stands beside them in a layer.
//
// Every function is batch-invariant: what a token gets is computed by the same operations in the same order whatever
// other tokens are in the call, and however many threads work. Element (m, n) of a product is LANES partial sums, lane
// l over k = l, l + LANES, ..., then one tree over the lanes.
//
// Legend: M tokens, K inputs, N outputs, x [M, K], w [N, K], y [M, N]; ld*: numbers from one row to the next.
#include <algorithm>
#include <cmath>
#include "vec.h"

#ifdef __AVX512F__
enum { TOKENS = 3, ROWS = 8 };  // accumulators of a tile: 24 of 32 registers
#else
enum { TOKENS = 2, ROWS = 4 };
#endif
enum { CHUNK = 64, AHEAD = 32 };  // rows of w that a thread takes at once; rows that are fetched ahead of use

struct Part {  // one of several products with the same x
  const float *w, *bias;  // bias may be null
  float* y;
  long N, ldy;
};

// y[m, n] for R tokens and C rows of w. With FETCH lines of w from `ahead` on are fetched, `fetch` of them per step of k.
template <int R, int C, bool FETCH>
static void tile(const float* x, long ldx, const float* w, const float* bias, float* y, long ldy, long K,
                 const float* ahead, int fetch) {
  vec acc[R][C];
  UNROLL for (int i = 0; i < R; i++)
    UNROLL for (int j = 0; j < C; j++) acc[i][j] = vec{};
  long k = 0;
  for (; k + LANES <= K; k += LANES) {
    if (FETCH)
      for (int f = 0; f < fetch; f++, ahead += 16) __builtin_prefetch(ahead, 0, 2);
    vec a[R];
    UNROLL for (int i = 0; i < R; i++) {
      a[i] = load(x + i * ldx + k);
      HOLD(a[i]);
    }
    UNROLL for (int j = 0; j < C; j++) {
      vec b = load(w + j * K + k);
      HOLD(b);
      UNROLL for (int i = 0; i < R; i++) acc[i][j] += a[i] * b;
    }
  }
  if (k < K)
    for (int i = 0; i < R; i++)
      for (int j = 0; j < C; j++) acc[i][j] += load(x + i * ldx + k, K - k) * load(w + j * K + k, K - k);
  UNROLL for (int i = 0; i < R; i++) {
    float* out = y + i * ldy;
    if (C == 1) {
      out[0] = sum(acc[i][0]) + (bias ? bias[0] : 0.0f);
    } else {
      UNROLL for (int j = 0; j + 4 <= C; j += 4) {
        quad s = sum4(acc[i][j], acc[i][(j + 1) % C], acc[i][(j + 2) % C], acc[i][(j + 3) % C]);
        *(quad*)(out + j) = s + (bias ? *(const quad*)(bias + j) : quad{});
      }
    }
  }
}

// All M tokens against C rows of w.
template <int C>
static void rows(const float* x, long ldx, const float* w, const float* bias, float* y, long ldy, long M, long K) {
  long tiles = (M + TOKENS - 1) / TOKENS;
  int fetch = (int)((C + tiles - 1) / tiles) * LANES / 16;  // spread over the tiles
  const float *ahead = w + AHEAD * K, *end = ahead + C * K;
  for (long m = 0; m < M;) {
    long count = M - m >= TOKENS ? TOKENS : M - m >= 2 ? 2 : 1;
    bool now = ahead < end;
    auto f = count == TOKENS ? (now ? tile<TOKENS, C, true> : tile<TOKENS, C, false>)
             : count == 2    ? (now ? tile<2, C, true> : tile<2, C, false>)
                             : (now ? tile<1, C, true> : tile<1, C, false>);
    f(x + m * ldx, ldx, w, bias, y + m * ldy, ldy, K, ahead, fetch);
    m += count;
    ahead += now ? fetch * K : 0;
  }
}

// Rows [first, last) of w.
static void product(const float* x, long ldx, const Part& p, long first, long last, long M, long K) {
  enum { BLOCK = 96 };  // tokens whose x stays in the second cache
  for (long m = 0; m < M; m += BLOCK) {
    long count = std::min<long>(BLOCK, M - m);
    const float* from = x + m * ldx;
    long n = first;
    auto at = [&](auto&& f) { f(from, ldx, p.w + n * K, p.bias ? p.bias + n : nullptr, p.y + m * p.ldy + n, p.ldy, count, K); };
    for (; n + ROWS <= last; n += ROWS) at(rows<ROWS>);
    for (; n < last; n++) at(rows<1>);
  }
}

INLINE long chunks(long N) { return (N + CHUNK - 1) / CHUNK; }

INLINE vec silu(vec a) { return a / (exp(-a) + 1.0f); }

template <class F>  // a row by vectors; the last one may be shorter
INLINE void by_vectors(long n, F&& f) {
  for (long i = 0; i < n; i += LANES) f(i, std::min<long>(LANES, n - i));
}

INLINE float rms(const float* x, long n, float eps) {
  vec squares = {};
  long i = 0;
  for (; i + LANES <= n; i += LANES) squares += load(x + i) * load(x + i);
  if (i < n) squares += load(x + i, n - i) * load(x + i, n - i);
  return 1.0f / std::sqrt(sum(squares) / n + eps);
}

// y = x / rms(x) · (w + plus); y may be x, w null for ones.
INLINE void norm(const float* x, const float* w, float* y, long n, float eps, float plus) {
  float scale = rms(x, n, eps);
  by_vectors(n, [&](long i, long c) {
    vec a = load(x + i, c) * scale;
    store(y + i, w ? a * (load(w + i, c) + plus) : a, c);
  });
}

extern "C" {

// Several products with one x.
void hr_linear(const float* x, long ldx, long M, long K, const Part* parts, long num_parts, int threads) {
  long total = 0;
  for (long i = 0; i < num_parts; i++) total += chunks(parts[i].N);
#pragma omp parallel for num_threads(threads) schedule(dynamic)
  for (long c = 0; c < total; c++) {
    const Part* p = parts;
    long mine = c;
    while (mine >= chunks(p->N)) mine -= chunks(p++->N);
    product(x, ldx, *p, mine * CHUNK, std::min(p->N, (mine + 1) * CHUNK), M, K);
  }
}

// down · (silu(gate · x) * (up · x)), the inner values in hidden [M, gate.N] and spare [M, gate.N].
void hr_gated(const float* x, long ldx, long M, long K, const Part* gate, const Part* up, const Part* down, int threads) {
  long inner = gate->N;
#pragma omp parallel num_threads(threads)
  {
#pragma omp for schedule(dynamic)
    for (long c = 0; c < chunks(inner); c++) {
      long first = c * CHUNK, last = std::min(inner, first + CHUNK);
      product(x, ldx, *gate, first, last, M, K);
      product(x, ldx, *up, first, last, M, K);
      for (long m = 0; m < M; m++) {
        float *g = gate->y + m * inner + first, *u = up->y + m * inner + first;
        by_vectors(last - first, [&](long i, long n) { store(g + i, silu(load(g + i, n)) * load(u + i, n), n); });
      }
    }
#pragma omp for schedule(dynamic)
    for (long c = 0; c < chunks(down->N); c++)
      product(gate->y, inner, *down, c * CHUNK, std::min(down->N, (c + 1) * CHUNK), M, inner);
  }
}

// y[m] = x[m] / rms(x[m]) · (w + plus).
void hr_norm(const float* x, long ldx, const float* w, float* y, long M, long n, float eps, float plus, int threads) {
#pragma omp parallel for num_threads(M * n > 65536 ? threads : 1)
  for (long m = 0; m < M; m++) norm(x + m * ldx, w, y + m * n, n, eps, plus);
}

// In place, per token: heads of size E are normed (w null: not), then their first `turn` numbers rotated:
// x cos + (-second half, first half) sin, cos and sin [M, turn].
void hr_heads(float* x, long ldx, long M, long heads, long E, const float* w, int normed, float eps, float plus,
              const float* cos, const float* sin, long turn, int threads) {
  long half = turn / 2;
#pragma omp parallel for num_threads(M * heads * E > 65536 ? threads : 1)
  for (long m = 0; m < M; m++) {
    const float *c = cos + m * turn, *s = sin + m * turn;
    for (float* head = x + m * ldx; head < x + m * ldx + heads * E; head += E) {
      if (normed) norm(head, w, head, E, eps, plus);
      by_vectors(half, [&](long i, long n) {
        vec a = load(head + i, n), b = load(head + half + i, n);
        store(head + i, a * load(c + i, n) - b * load(s + i, n), n);
        store(head + half + i, b * load(c + half + i, n) + a * load(s + half + i, n), n);
      });
    }
  }
}

// y[m] = log softmax(x[m]).
void hr_log_softmax(const float* x, long ldx, float* y, long M, long n, int threads) {
#pragma omp parallel for num_threads(M * n > 65536 ? threads : 1)
  for (long m = 0; m < M; m++) {
    const float* row = x + m * ldx;
    float most = *std::max_element(row, row + n);
    vec total = {};
    by_vectors(n, [&](long i, long c) {
      vec e = exp(load(row + i, c) - most);
      total += load((const float*)&e, c);  // lanes beyond the row are zeros again
    });
    float away = most + std::log(sum(total));
    for (long i = 0; i < n; i++) y[m * n + i] = row[i] - away;
  }
}
}
