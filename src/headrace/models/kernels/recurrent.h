// One token of each of R sequences through the recurrences of headrace.models.recurrent; the states are in slots of a
// pool, and are updated there. What a sequence gets does not depend on the others.
//
// Legend: R rows, C channels, W weights of a channel, G groups or key heads, H heads, K key size, V value size, E
// channels of a head, N numbers of a channel's state.
#pragma once
#include <cmath>
#include <vector>
#include "linear.h"
#include "team.h"
#include "vec.h"

struct Slots {
  float* pool;
  const long* of;  // [R]
  long R;
};
struct Heads {  // [R, heads, size], dense
  const float* at;
  long heads, size;
};

// window <- its last W - 1 inputs and x; out = weights · window, after SiLU if `silu`. out may be x.
template <int W>
static void convolve(float* window, const float* x, const float* weight, const float* bias, long C, int silu,
                     float* out) {
  for (long c = 0; c < C; c++) {
    const float *w = weight + c * W, now = x[c];
    float *kept = window + c * (W - 1), total = bias ? bias[c] : 0;
    UNROLL for (int i = 0; i + 1 < W; i++) total += w[i] * kept[i];
    UNROLL for (int i = 0; i + 2 < W; i++) kept[i] = kept[i + 1];
    if (W > 1) kept[W - 2] = now;
    out[c] = total + w[W - 1] * now;
  }
  if (silu) by_vectors(C, [&](long c, long n) { store(out + c, ::silu(load(out + c, n)), n); });
}

struct Filter {  // of C channels: weights [C, W], bias [C] or null
  const float *weight, *bias;
  long C, W;
  int silu;
};

// Row r: x [R, C], ldx apart; out as x or dense.
ONCE void convolve(const Slots& s, const Filter& f, const float* x, long ldx, float* out, long ldo, long r) {
  float* window = s.pool + s.of[r] * f.C * (f.W - 1);
  x += r * ldx, out += r * ldo;
  switch (f.W) {
    case 1: return convolve<1>(window, x, f.weight, f.bias, f.C, f.silu, out);
    case 2: return convolve<2>(window, x, f.weight, f.bias, f.C, f.silu, out);
    case 3: return convolve<3>(window, x, f.weight, f.bias, f.C, f.silu, out);
    case 4: return convolve<4>(window, x, f.weight, f.bias, f.C, f.silu, out);
  }
}

INLINE float scale_of(const float* a, long size, int normed) {
  if (!normed) return 1;
  vec total = {};
  by_vectors(size, [&](long i, long n) { total += load(a + i, n) * load(a + i, n); });
  return 1.0f / std::sqrt(sum(total) + 1e-6f);
}

struct Token {  // of one head: query and key [K], value [V]; the factors of query and key, the decay, the rate
  const float *q, *k, *v;
  float from, into, fade, rate;
};

// N vectors of the values of a head, of `some` lanes each. A row of S is the V numbers of one number of the key.
template <int N>
INLINE void delta(float* state, const Token& t, long K, long V, float* y, long some) {
  vec at_key[N] = {}, at_query[N] = {};
  float both = 0;
  for (long i = 0; i < K; i++) {
    const float *row = state + i * V, key = t.k[i] * t.into, query = t.q[i] * t.from;
    both += key * query;
    UNROLL for (int j = 0; j < N; j++) {
      vec kept = load(row + j * LANES, some);
      at_key[j] += kept * key, at_query[j] += kept * query;
    }
  }
  vec change[N];
  UNROLL for (int j = 0; j < N; j++) {
    change[j] = (load(t.v + j * LANES, some) - at_key[j] * t.fade) * t.rate;
    store(y + j * LANES, at_query[j] * t.fade + change[j] * both, some);
  }
  for (long i = 0; i < K; i++) {
    float *row = state + i * V, key = t.k[i] * t.into;
    UNROLL for (int j = 0; j < N; j++) store(row + j * LANES, load(row + j * LANES, some) * t.fade + change[j] * key, some);
  }
}

// S <- e^g S; S <- S + k (v - S^T k)^T b; y = S^T q.
ONCE void delta(float* state, Token t, long K, long V, int normed, float* y) {
  t.into = scale_of(t.k, K, normed), t.from = scale_of(t.q, K, normed) / std::sqrt((float)K);
  long j = 0;
  for (; j + 4 * LANES <= V; j += 4 * LANES, t.v += 4 * LANES) delta<4>(state + j, t, K, V, y + j, LANES);
  for (; j < V; j += LANES, t.v += LANES) delta<1>(state + j, t, K, V, y + j, std::min<long>(LANES, V - j));
}

// What stands between the products of a mixer with the gated delta rule. A token's products are [q | k | v | z | b | a].
struct DeltaNet {
  Filter filter;                 // of q, k, v
  const float *rate, *step;      // log A and the bias of the step [H]
  Norm norm;                     // of a head's output, before its gate z
  const float *windows, *states; // the pools
  const long* of;                // the slot of each row
  long R, G, H, K, V;
};

INLINE float sigmoid(float a) { return 1.0f / (1.0f + std::exp(-a)); }
INLINE float softplus(float a) { return a > 20 ? a : std::log1p(std::exp(a)); }

// Head h of row r, after the convolution: out = norm(S^T q) · silu(z), [H V] a row.
ONCE void delta_head(const DeltaNet& d, const float* row, float* out, long r, long h) {
  const long g = h / (d.H / d.G), keys = d.G * d.K, values = d.H * d.V;
  const float *v = row + 2 * keys + h * d.V, *z = v + values, *b = row + 2 * keys + 2 * values + h, *a = b + d.H;
  Token token{row + g * d.K, row + keys + g * d.K, v};
  token.fade = std::exp(-std::exp(d.rate[h]) * softplus(*a + d.step[h])), token.rate = sigmoid(*b);
  out += h * d.V;
  delta((float*)d.states + (d.of[r] * d.H + h) * d.K * d.V, token, d.K, d.V, 1, out);
  normed(out, d.norm, out, d.V);
  by_vectors(d.V, [&](long i, long n) { store(out + i, load(out + i, n) * silu(load(z + i, n)), n); });
}

// Two phases: rows [R, ldy], in place, to out [R, ldo].
INLINE void delta_net(Member& me, const DeltaNet& d, float* rows, long ldy, float* out, long ldo) {
  const Slots windows{(float*)d.windows, d.of, d.R};
  me.each(d.R, [&](long r) { convolve(windows, d.filter, rows, ldy, rows, ldy, r); });
  me.each(d.R * d.H, [&](long i) { delta_head(d, rows + i / d.H * ldy, out + i / d.H * ldo, i / d.H, i % d.H); });
}

// h <- e^(d a) h + d x B; out = h · C + D x.
static void scan(const Slots& s, const Heads& x, const float* step, const Heads* bc, const float* rate,
                 const float* skip, float* out, long r, long h) {
  const long H = x.heads, E = x.size, N = bc[0].size, g = h / (H / bc[0].heads);
  const float *B = bc[0].at + (r * bc[0].heads + g) * N, *C = bc[1].at + (r * bc[0].heads + g) * N;
  const float d = step[r * H + h], fade = std::exp(d * rate[h]);
  float* state = s.pool + (s.of[r] * H + h) * E * N;
  for (long e = 0; e < E; e++, state += N) {
    const float now = x.at[(r * H + h) * E + e], in = d * now;
    vec total = {};
    for (long n = 0; n < N; n += LANES) {
      vec kept = load(state + n, N - n) * fade + load(B + n, N - n) * in;
      store(state + n, kept, N - n);
      total += kept * load(C + n, N - n);
    }
    out[(r * H + h) * E + e] = sum(total) + (skip ? skip[h] * now : 0);
  }
}

// The same with a rate and a step for each channel, and a rate for each number of its state: x, step [R, E].
static void select(const Slots& s, const Heads& x, const float* step, const Heads* bc, const float* rate, float* out,
                   long r) {
  const long E = x.size, N = bc[0].size;
  const float *B = bc[0].at + r * N, *C = bc[1].at + r * N;
  float* state = s.pool + s.of[r] * E * N;
  for (long e = 0; e < E; e++, state += N, rate += N) {
    const float d = step[r * E + e], in = d * x.at[r * E + e];
    vec total = {};
    for (long n = 0; n < N; n += LANES) {
      vec kept = load(state + n, N - n) * exp(load(rate + n, N - n) * d) + load(B + n, N - n) * in;
      store(state + n, kept, N - n);
      total += kept * load(C + n, N - n);
    }
    out[r * E + e] = sum(total);
  }
}
