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
enum { PANEL = 2 * LANES, STEPS = 2 };  // rows; of k, or pairs of k
enum { BLOCK = 8 * TOKENS, HANDFUL = 8 };  // tokens whose x stays in the second cache; of a task that has no product

struct Input {
  const number* x;
  long ldx, M, K;
};
struct Lora {            // what adapters add to a product: y += (x a) b, R a multiple of LANES
  const float *a, *b;    // [G, K, R] and [G, R, N] of G adapters; null: there are none
  const int* of;         // [M]: each token's adapter; -1: it has none
  float* h;              // [M, R]: x a, made before the product
  long R;
};
struct Part {            // one of several products with the same x: y = x wᵀ + bias + add
  const number* w;
  const number* panels;     // w packed; null: it is packed on the way
  const number* bias;       // may be null
  const number* add;        // laid as y, may be y or null
  number* y;
  long N, ldy;
  Lora lora;
};
struct Norm {  // x / rms(x) · (w + plus)
  const number* w;
  float eps, plus;
};

INLINE long count_panels(long N) { return (N + PANEL - 1) / PANEL; }

#include "amx.h"
#ifdef MATRIX_UNIT
INLINE long most_tokens() { return has_tiles() ? (long)MOST : (long)TOKENS; }
// The numbers of k of a panel's row.
INLINE long deep(long K) { return (K + DEPTH - 1) / DEPTH * DEPTH; }
#else
INLINE void leave_tiles() {}
INLINE long most_tokens() { return TOKENS; }
INLINE long deep(long K) { return (K + PAIR - 1) / PAIR * PAIR; }
#endif

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
  const number* at;
  long lines;

  void next(long count) {
    if (lines <= 0) return;
    for (long i = 0; i < count; i++, at += LINE) __builtin_prefetch(at, 0, 2);
    lines -= count;
  }
};

// Rows [n, n + PANEL) of w; those beyond the last are zeros.
static void pack(const number* w, long N, long K, long n, number* panel) {
  const long rows = std::min<long>(PANEL, N - n);
  w += n * K;
  if (rows < PANEL || K < deep(K)) std::fill_n(panel, PANEL * deep(K), number{});
  for (long r = 0; r < rows; r += LANES) {
    long k = 0;
    if (r + LANES <= rows && K % PAIR == 0)  // pairs are moved like floats
      for (; k + PAIR * LANES <= K; k += PAIR * LANES)
        transpose((const float*)(w + r * K + k), K / PAIR, (float*)(panel + k * PANEL + PAIR * r));
    for (; k < K; k++)
      for (long i = r; i < std::min<long>(rows, r + LANES); i++)
        panel[k / PAIR * PAIR * PANEL + PAIR * i + k % PAIR] = w[i * K + k];
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

// What is added to the sums of token m and a panel that begins with output n, and then to y.
INLINE void finish(const Part& p, long m, long n, vec low, vec high) {
  const long at = m * p.ldy + n, lanes = p.N - n;
  if (lanes >= PANEL) {
    if (p.bias) low += load(p.bias + n), high += load(p.bias + n + LANES);
    if (p.add) low = load(p.add + at) + rounded(low), high = load(p.add + at + LANES) + rounded(high);
    store(p.y + at, low), store(p.y + at + LANES, high);
  } else {
    for (long j = 0; j < lanes; j += LANES) {
      const long some = std::min<long>(LANES, lanes - j);
      vec sum = j ? high : low;
      if (p.bias) sum += load(p.bias + n + j, some);
      store(p.y + at + j, p.add ? load(p.add + at + j, some) + rounded(sum) : sum, some);
    }
  }
}

// R tokens and a panel.
template <int R>
static void tile(const Input& in, const Part& p, const number* panel, long m, long n, Fetch& fetch, long at_once) {
  const long ldx = in.ldx, K = in.K;
  const number* x = in.x + m * ldx;
  Fetch ahead = fetch;  // in registers
  vec low[R], high[R];
  UNROLL16 for (int i = 0; i < R; i++) low[i] = high[i] = vec{};
  auto step = [&](long k, long count) __attribute__((always_inline)) {
    pairs a = load_pairs(panel + k * PANEL), b = load_pairs(panel + k * PANEL + PAIR * LANES);
    HOLD(a);
    HOLD(b);
    UNROLL16 for (int i = 0; i < R; i++) {
      pairs each = all_pairs(x + i * ldx + k, count);
      low[i] = add_products(low[i], each, a), high[i] = add_products(high[i], each, b);
    }
  };
  long k = 0;
  for (; k + PAIR * STEPS <= K; k += PAIR * STEPS) {
    ahead.next(at_once);
    UNROLL for (int i = 0; i < STEPS; i++) step(k + PAIR * i, PAIR);
  }
  for (; k + PAIR <= K; k += PAIR) step(k, PAIR);
  if (k < K) step(k, 1);
  fetch = ahead;
  if (p.lora.a) {
    UNROLL16 for (int i = 0; i < R; i++) {
      const Wide more = widen(p.lora, m + i, n, p.N);
      low[i] += more.low, high[i] += more.high;
    }
  }
  UNROLL16 for (int i = 0; i < R; i++) finish(p, m + i, n, low[i], high[i]);
}

using Tiles = void (*)(const Input&, const Part&, const number*, long, long, Fetch&, long);
template <int... R>
static Tiles tile_of(long tokens, std::integer_sequence<int, R...>) {
  static const Tiles all[] = {tile<R + 1>...};
  return all[tokens - 1];
}

#ifdef MATRIX_UNIT
// Up to MOST tokens and a panel.
static void tile_by_unit(const Input& in, const Part& p, const number* panel, long m, long tokens, long n, Fetch& fetch,
                         long at_once) {
  alignas(64) float sums[MOST * PANEL];
  auto meanwhile = [&]() __attribute__((always_inline)) { fetch.next(at_once); };
  shape_tiles(tokens);
  const number* x = in.x + m * in.ldx;
  (tokens > ROWS ? sum_tiles<true, decltype(meanwhile)> : sum_tiles<false, decltype(meanwhile)>)(
      x, in.ldx, tokens, in.K, panel, sums, meanwhile);
  for (long i = 0; i < tokens; i++) {
    Wide sum{load(sums + i * PANEL), load(sums + i * PANEL + LANES)};
    if (p.lora.a) {
      const Wide more = widen(p.lora, m + i, n, p.N);
      sum.low += more.low, sum.high += more.high;
    }
    finish(p, m + i, n, sum.low, sum.high);
  }
}
#endif

// Where the weights of panel c of a product lie; they are of one size, packed or not, but for the last.
INLINE const number* weights_of(const Part& p, long K, long c) {
  return p.panels ? p.panels + c * PANEL * deep(K) : p.w + c * PANEL * K;
}

// Tokens against panel c of a product; `next` (null: nothing) is what the thread reads after it.
static void product(const Input& in, const Part& p, long c, const number* next) {
  if (!in.M) return;
  static thread_local std::vector<number> room;
  const long size = PANEL * deep(in.K), most = most_tokens(), tiles = (in.M + most - 1) / most;
  const number* panel = weights_of(p, in.K, c);
  Fetch fetch{next, next ? size / LINE : 0};
  if (!p.panels) {
    room.resize(std::max<size_t>(room.size(), size));
    pack(p.w, p.N, in.K, c * PANEL, room.data());
    panel = room.data();
  }
#ifdef MATRIX_UNIT
  if (has_tiles()) {
    for (long at = 0; at < in.M;) {
      const long left = (in.M - at + MOST - 1) / MOST, tokens = (in.M - at + left - 1) / left;
      tile_by_unit(in, p, panel, at, tokens, c * PANEL, fetch, (DEPTH * PANEL / LINE + tiles - 1) / tiles);
      at += tokens;
    }
    return;
  }
#endif
  const long at_once = (PAIR * STEPS * PANEL / LINE + tiles - 1) / tiles;
  for (long m = 0; m < in.M; m += BLOCK)
    for (long at = m, end = std::min<long>(in.M, m + BLOCK); at < end;) {
      const long left = (end - at + TOKENS - 1) / TOKENS, tokens = (end - at + left - 1) / left;
      tile_of(tokens, std::make_integer_sequence<int, TOKENS>{})(in, p, panel, at, c * PANEL, fetch, at_once);
      at += tokens;
    }
}

// x a of one token: four sums, of every fourth k each, and then their sum.
ONCE void narrow(const Input& in, const Lora& lora, long m) {
  const number* x = in.x + m * in.ldx;
  const float* a = lora.a + lora.of[m] * in.K * lora.R;
  for (long r = 0; r < lora.R; r += LANES) {
    vec sums[4] = {};
    long k = 0;
    for (; k + 4 <= in.K; k += 4) UNROLL for (int i = 0; i < 4; i++) sums[i] += wide(x[k + i]) * load(a + (k + i) * lora.R + r);
    for (; k < in.K; k++) sums[0] += wide(x[k]) * load(a + k * lora.R + r);
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
INLINE const number* weights_of(const Part* parts, long num_parts, long K, long c) {
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
    const number* ahead = weights_of(parts, num_parts, in.K, next);
    const Part* p = parts;
    while (c >= count_panels(p->N)) c -= count_panels(p++->N);
    product(in, *p, c, ahead);
  });
  leave_tiles();
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
      number *g = gate.y + m * gate.ldy + first, *u = up.y + m * up.ldy + first;
      by_vectors(size, [&](long i, long n) { store(g + i, rounded(silu(load(g + i, n))) * load(u + i, n), n); });
    }
  });
  products(me, {gate.y, gate.ldy, in.M, gate.N}, &down, 1);
}

INLINE float rms(const number* x, long n, float eps) {
  vec squares = {};
  long i = 0;
  for (; i + LANES <= n; i += LANES) squares += load(x + i) * load(x + i);
  if (i < n) squares += load(x + i, n - i) * load(x + i, n - i);
  return 1.0f / std::sqrt(sum(squares) / n + eps);
}

// y may be x.
ONCE void normed(const number* x, const Norm& norm, number* y, long n) {
  float scale = rms(x, n, norm.eps);
  by_vectors(n, [&](long i, long c) {
    const vec scaled = load(x + i, c) * scale;  // rounded where the modules of transformers round
    store(y + i, (norm.plus ? scaled : rounded(scaled)) * (load(norm.w + i, c) + norm.plus), c);
  });
}

struct Turn {  // [M, size] each: x cos + (-second half, first half) sin, for the first `size` numbers of a head
  const number *cos, *sin;
  long size;
};

// The heads of one token, of E numbers each, `apart` from one to the next, in place: normed (norm.w null: not), then
// turned.
ONCE void heads(number* head, long num, long E, long apart, const Norm& norm, const Turn& turn, long m) {
  const number *c = turn.cos + m * turn.size, *s = turn.sin + m * turn.size;
  long half = turn.size / 2;
  for (; num; num--, head += apart) {
    if (norm.w) normed(head, norm, head, E);
    by_vectors(half, [&](long i, long n) {
      vec a = load(head + i, n), b = load(head + half + i, n);
      store(head + i, rounded(a * load(c + i, n)) - rounded(b * load(s + i, n)), n);
      store(head + half + i, rounded(b * load(c + half + i, n)) + rounded(a * load(s + half + i, n)), n);
    });
  }
}

// The heads of one token, of V numbers each, times the sigmoids of others, `apart` from one head to the next.
ONCE void gate_heads(number* head, const number* gate, long num, long V, long apart) {
  for (; num; num--, head += V, gate += apart)
    by_vectors(V, [&](long i, long n) { store(head + i, load(head + i, n) / (exp(-load(gate + i, n)) + 1.0f), n); });
}

#ifndef BFLOAT16
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
#endif
