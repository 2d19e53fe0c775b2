// Products, and what stands beside them in a layer: the phases of calls.
//
// Weights are read in panels: PANEL rows, whose numbers of one k lie side by side. Who keeps weights for many calls packs
// them beforehand; others' are packed on the way, panel by panel.
//
// Batch-invariant: what a token gets is computed by the same operations in the same order whatever other tokens are in
// the call, and however many threads work. Element (m, n) of a product is one sum over k = 0, 1, ..., fused multiply-adds.
//
// Legend: M tokens, K inputs, N outputs, x [M, K], w [N, K], y [M, N]; ld*: numbers from one row to the next.
#pragma once
#include <algorithm>
#include <cmath>
#include <initializer_list>
#include <utility>
#include <vector>
#include "team.h"
#include "vec.h"

#ifdef __AVX512F__
enum { TOKENS = 13 };  // of a tile: 26 sums in 32 registers
#else
enum { TOKENS = 6 };   // 12 in 16
#endif
enum { PANEL = 2 * LANES, LINE = 16, STEPS = 2 };  // rows; numbers; of k
enum { BLOCK = 8 * TOKENS, HANDFUL = 8 };  // tokens whose x stays in the second cache; of a task that has no product

struct Input {
  const float* x;
  long ldx, M, K;
};
struct Lora {            // what adapters add to a product: y += (x a) b, R a multiple of LANES
  const float *a, *b;    // [G, K, R] and [G, R, N] of G adapters; null: there are none
  const int* of;         // [M]: each token's adapter; -1: it has none
  float* h;              // [M, R]: x a, made before the product
  long R;
};
struct Part {            // one of several products with the same x: y = x wᵀ + bias + add
  const float* w;
  const float* panels;   // w packed; null: it is packed on the way
  const float* bias;     // may be null
  const float* add;      // laid as y, may be y or null
  float* y;
  long N, ldy;
  Lora lora;
};
struct Norm {  // x / rms(x) · (w + plus)
  const float* w;
  float eps, plus;
};

INLINE long count_panels(long N) { return (N + PANEL - 1) / PANEL; }

// LANES rows of LANES numbers, ld apart, to columns PANEL apart.
INLINE void transpose(const float* from, long ld, float* to) {
  vec row[LANES], mixed[LANES];
  UNROLL16 for (int i = 0; i < LANES; i++) row[i] = load(from + i * ld);
  UNROLL for (int half = LANES / 2, round = 1; round < LANES; round *= 2) {
    UNROLL16 for (int i = 0; i < half; i++) {
      mixed[2 * i] = zip_low(row[i], row[i + half]);
      mixed[2 * i + 1] = zip_high(row[i], row[i + half]);
    }
    UNROLL16 for (int i = 0; i < LANES; i++) row[i] = mixed[i];
  }
  UNROLL16 for (int i = 0; i < LANES; i++) store(to + i * PANEL, row[i]);
}

// What comes after the panel that is worked on, to be fetched meanwhile: so many lines.
struct Fetch {
  const float* at;
  long lines;

  void next(long count) {
    if (lines <= 0) return;
    for (long i = 0; i < count; i++, at += LINE) __builtin_prefetch(at, 0, 2);
    lines -= count;
  }
};

// Rows [n, n + PANEL) of w; those beyond the last are zeros.
static void pack(const float* w, long N, long K, long n, float* panel) {
  const long rows = std::min<long>(PANEL, N - n);
  w += n * K;
  if (rows < PANEL) std::fill_n(panel, PANEL * K, 0.0f);
  for (long r = 0; r < rows; r += LANES) {
    long k = 0;
    if (r + LANES <= rows)
      for (; k + LANES <= K; k += LANES) transpose(w + r * K + k, K, panel + k * PANEL + r);
    for (; k < K; k++)
      for (long i = r; i < std::min<long>(rows, r + LANES); i++) panel[k * PANEL + i] = w[i * K + k];
  }
}

struct Wide {
  vec low, high;
};

// h b of one token, for the panel that begins with output n of N.
ONCE Wide widen(const Lora& lora, long m, long n, long N) {
  Wide sums = {};
  if (lora.of[m] < 0) return sums;
  const float *h = lora.h + m * lora.R, *b = lora.b + lora.of[m] * lora.R * N + n;
  const long lanes = N - n;
  for (long r = 0; r < lora.R; r++, b += N)
    if (lanes >= PANEL) sums.low += h[r] * load(b), sums.high += h[r] * load(b + LANES);
    else sums.low += h[r] * load(b, lanes), sums.high += h[r] * load(b + LANES, std::max(0L, lanes - LANES));
  return sums;
}

// R tokens and a panel.
template <int R>
static void tile(const Input& in, const Part& p, const float* panel, long m, long n, Fetch& fetch, long at_once) {
  const long ldx = in.ldx, K = in.K;
  const float* x = in.x + m * ldx;
  Fetch ahead = fetch;  // in registers
  vec low[R], high[R];
  UNROLL16 for (int i = 0; i < R; i++) low[i] = high[i] = vec{};
  auto step = [&](long k) __attribute__((always_inline)) {
    vec a = load(panel + k * PANEL), b = load(panel + k * PANEL + LANES);
    HOLD(a);
    HOLD(b);
    UNROLL16 for (int i = 0; i < R; i++) {
      vec each = all(x[i * ldx + k]);
      low[i] += each * a, high[i] += each * b;
    }
  };
  long k = 0;
  for (; k + STEPS <= K; k += STEPS) {
    ahead.next(at_once);
    UNROLL for (int i = 0; i < STEPS; i++) step(k + i);
  }
  for (; k < K; k++) step(k);
  fetch = ahead;
  const long lanes = p.N - n;
  if (p.lora.a) {
    UNROLL16 for (int i = 0; i < R; i++) {
      const Wide more = widen(p.lora, m + i, n, p.N);
      low[i] += more.low, high[i] += more.high;
    }
  }
  UNROLL16 for (int i = 0; i < R; i++) {
    const long at = (m + i) * p.ldy + n;
    if (lanes >= PANEL) {
      if (p.bias) low[i] += load(p.bias + n), high[i] += load(p.bias + n + LANES);
      if (p.add) low[i] = load(p.add + at) + low[i], high[i] = load(p.add + at + LANES) + high[i];
      store(p.y + at, low[i]), store(p.y + at + LANES, high[i]);
    } else {
      for (long j = 0; j < lanes; j += LANES) {
        const long some = std::min<long>(LANES, lanes - j);
        vec sum = j ? high[i] : low[i];
        if (p.bias) sum += load(p.bias + n + j, some);
        store(p.y + at + j, p.add ? load(p.add + at + j, some) + sum : sum, some);
      }
    }
  }
}

using Tiles = void (*)(const Input&, const Part&, const float*, long, long, Fetch&, long);
template <int... R>
static Tiles tile_of(long tokens, std::integer_sequence<int, R...>) {
  static const Tiles all[] = {tile<R + 1>...};
  return all[tokens - 1];
}

// Where the weights of panel c of a product lie; they are of one size, packed or not, but for the last.
INLINE const float* weights_of(const Part& p, long K, long c) { return (p.panels ? p.panels : p.w) + c * PANEL * K; }

// Tokens against panel c of a product; `next` (null: nothing) is what the thread reads after it.
static void product(const Input& in, const Part& p, long c, const float* next) {
  if (!in.M) return;
  static thread_local std::vector<float> room;
  const long lines = PANEL * in.K / LINE, tiles = (in.M + TOKENS - 1) / TOKENS;
  const float* panel = weights_of(p, in.K, c);
  Fetch fetch{next, next ? lines : 0};
  if (!p.panels) {
    room.resize(std::max<size_t>(room.size(), PANEL * in.K));
    pack(p.w, p.N, in.K, c * PANEL, room.data());
    panel = room.data();
  }
  const long at_once = (STEPS * PANEL / LINE + tiles - 1) / tiles;
  for (long m = 0; m < in.M; m += BLOCK)
    for (long at = m, end = std::min<long>(in.M, m + BLOCK); at < end;) {
      const long left = (end - at + TOKENS - 1) / TOKENS, tokens = (end - at + left - 1) / left;
      tile_of(tokens, std::make_integer_sequence<int, TOKENS>{})(in, p, panel, at, c * PANEL, fetch, at_once);
      at += tokens;
    }
}

// x a of one token: four sums, of every fourth k each, and then their sum.
ONCE void narrow(const Input& in, const Lora& lora, long m) {
  const float *x = in.x + m * in.ldx, *a = lora.a + lora.of[m] * in.K * lora.R;
  for (long r = 0; r < lora.R; r += LANES) {
    vec sums[4] = {};
    long k = 0;
    for (; k + 4 <= in.K; k += 4) UNROLL for (int i = 0; i < 4; i++) sums[i] += x[k + i] * load(a + (k + i) * lora.R + r);
    for (; k < in.K; k++) sums[0] += x[k] * load(a + k * lora.R + r);
    store(lora.h + m * lora.R + r, (sums[0] + sums[1]) + (sums[2] + sums[3]));
  }
}

// x a of all tokens, for those of several products that have adapters.
static void narrow_all(Member& me, const Input& in, const Part* parts, long num_parts) {
  if (std::none_of(parts, parts + num_parts, [](const Part& p) { return p.lora.a; })) return;
  me.each((in.M + HANDFUL - 1) / HANDFUL, [&](long t) {
    for (const Part* p = parts; p < parts + num_parts; p++)
      for (long m = t * HANDFUL; p->lora.a && m < std::min<long>(in.M, (t + 1) * HANDFUL); m++)
        if (p->lora.of[m] >= 0) narrow(in, p->lora, m);
  });
}

// Memory for x a of several products.
struct Narrow {
  std::vector<float> numbers;

  void give(long M, std::initializer_list<std::pair<Part*, long>> several) {
    long total = 0;
    auto each = [&](auto&& f) {
      for (auto [parts, num] : several)
        for (Part* p = parts; p < parts + num; p++)
          if (p->lora.a) f(p->lora);
    };
    each([&](Lora& lora) { total += M * lora.R; });
    numbers.resize(total);
    float* at = numbers.data();
    each([&](Lora& lora) { lora.h = at, at += M * lora.R; });
  }
};

// The same of panel c of several products; null beyond the last.
INLINE const float* weights_of(const Part* parts, long num_parts, long K, long c) {
  for (const Part* p = parts; p < parts + num_parts; c -= count_panels(p++->N))
    if (c < count_panels(p->N)) return weights_of(*p, K, c);
  return nullptr;
}

// Several products with one x.
static void products(Member& me, const Input& in, const Part* parts, long num_parts) {
  narrow_all(me, in, parts, num_parts);
  long total = 0;
  for (long i = 0; i < num_parts; i++) total += count_panels(parts[i].N);
  me.each_after(total, [&](long c, long next) {
    const float* ahead = weights_of(parts, num_parts, in.K, next);
    const Part* p = parts;
    while (c >= count_panels(p->N)) c -= count_panels(p++->N);
    product(in, *p, c, ahead);
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
  narrow_all(me, in, &gate, 1);
  narrow_all(me, in, &up, 1);
  me.each_after(count_panels(gate.N), [&](long c, long next) {
    product(in, gate, c, weights_of(up, in.K, c));
    product(in, up, c, weights_of(&gate, 1, in.K, next));
    long first = c * PANEL, size = std::min<long>(PANEL, gate.N - first);
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

// The heads of one token, of E numbers each, `apart` from one to the next, in place: normed (norm.w null: not), then
// turned.
ONCE void heads(float* head, long num, long E, long apart, const Norm& norm, const Turn& turn, long m) {
  const float *c = turn.cos + m * turn.size, *s = turn.sin + m * turn.size;
  long half = turn.size / 2;
  for (; num; num--, head += apart) {
    if (norm.w) normed(head, norm, head, E);
    by_vectors(half, [&](long i, long n) {
      vec a = load(head + i, n), b = load(head + half + i, n);
      store(head + i, a * load(c + i, n) - b * load(s + i, n), n);
      store(head + half + i, b * load(c + half + i, n) + a * load(s + half + i, n), n);
    });
  }
}

// The heads of one token, of V numbers each, times the sigmoids of others, `apart` from one head to the next.
ONCE void gate_heads(float* head, const float* gate, long num, long V, long apart) {
  for (; num; num--, head += V, gate += apart)
    by_vectors(V, [&](long i, long n) { store(head + i, load(head + i, n) / (exp(-load(gate + i, n)) + 1.0f), n); });
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
