// One token of each of R sequences through the recurrences of headrace.models.recurrent; the states are in slots of a
// pool, and are updated there. What a sequence gets does not depend on the others.
//
// Legend: R rows, C channels, W weights of a channel, G groups or key heads, H heads, K key size, V value size, E
// channels of a head, N numbers of a channel's state.
#pragma once
#include <cmath>
#include <vector>
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

// window <- its last W - 1 inputs and x; out = weights · window, after SiLU if `silu`.
static void convolve(const Slots& s, const float* x, long ldx, const float* weight, const float* bias, long C, long W,
                     int silu, float* out, long r) {
  float* window = s.pool + s.of[r] * C * (W - 1);
  for (long c = 0; c < C; c++, window += W - 1) {
    const float* w = weight + c * W;
    float now = x[r * ldx + c], total = bias ? bias[c] : 0;
    for (long i = 0; i + 1 < W; i++) total += w[i] * window[i];
    total += w[W - 1] * now;
    for (long i = 0; i + 2 < W; i++) window[i] = window[i + 1];
    if (W > 1) window[W - 2] = now;
    out[r * C + c] = silu ? total / (1.0f + std::exp(-total)) : total;
  }
}

static float scale_of(const float* a, long size, int normed) {
  if (!normed) return 1;
  float total = 0;
  for (long i = 0; i < size; i++) total += a[i] * a[i];
  return 1.0f / std::sqrt(total + 1e-6f);
}

// S <- e^g S; S <- S + k (v - S^T k)^T b; out = S^T q. A row of S is the V numbers of one number of the key.
static void delta(const Slots& s, const Heads* qkv, const float* decay, const float* rate, int normed, float* out,
                  float* found, long r, long h) {
  const long K = qkv[1].size, V = qkv[2].size, H = qkv[2].heads, g = h / (H / qkv[1].heads);
  const float *q = qkv[0].at + (r * qkv[1].heads + g) * K, *k = qkv[1].at + (r * qkv[1].heads + g) * K;
  const float *v = qkv[2].at + (r * H + h) * V, fade = std::exp(decay[r * H + h]), b = rate[r * H + h];
  const float into = scale_of(k, K, normed), from = scale_of(q, K, normed) / std::sqrt((float)K);
  float *state = s.pool + (s.of[r] * H + h) * K * V, *y = out + (r * H + h) * V;
  for (long j = 0; j < V; j++) found[j] = y[j] = 0;
  for (long i = 0; i < K; i++) {
    float *row = state + i * V, key = k[i] * into;
    for (long j = 0; j < V; j++) {
      row[j] *= fade;
      found[j] += key * row[j];
    }
  }
  for (long j = 0; j < V; j++) found[j] = (v[j] - found[j]) * b;
  for (long i = 0; i < K; i++) {
    float *row = state + i * V, key = k[i] * into, query = q[i] * from;
    for (long j = 0; j < V; j++) {
      row[j] += key * found[j];
      y[j] += query * row[j];
    }
  }
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
