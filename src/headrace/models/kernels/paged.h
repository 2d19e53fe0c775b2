// Attention over a key-value cache in blocks (headrace.models.paged.base).
//
// Batch- and chunk-invariant: what token and head get is a function of the token's position and its context, whether it
// is decoded or stands in a prefill of any length. Positions are taken in STRETCHes from multiples of STRETCH on; in
// each the softmax moves to the new maximum once (Milakov and Gimelshein 2018, "Online normalizer calculation").
//
// Legend: R rows, N tokens, K key-value heads, H query heads, G = H / K, E key size, V value size, S places of a block.
#pragma once
#include <algorithm>
#include <cmath>
#include <limits>
#include <vector>
#include "team.h"
#include "vec.h"

enum { S = 16, STRETCH = 128, QUERIES = 16, GROUP = 4, SHARE = 4, DISTANCE = STRETCH / S };
// QUERIES of a tile share what they read of the cache; SHARE of them a GROUP of keys in registers
static const float NONE = -std::numeric_limits<float>::infinity();

struct Pass {
  const int* tables;  // [R, width]
  const long *starts, *counts;
  long R, width;
};
struct Tensor3 {  // [N, heads, size], the last dimension dense
  number* at;
  long token, head;
};
struct Layer {
  number *keys, *values;  // [P, K, S, E], [P, K, S, V]
  const number* sinks;    // [H] or null
  long H, K, E, V, window, chunk;  // window, chunk 0: none
  float scale, softcap;     // softcap 0: none
};
struct Tile {  // tokens of one row
  long row, place, position, count;
};

static std::vector<Tile> cut(const Pass& pass, long most) {
  std::vector<Tile> tiles;
  long place = 0;
  for (long r = 0; r < pass.R; place += pass.counts[r++])
    for (long t = 0; t < pass.counts[r]; t += most)
      tiles.push_back({r, place + t, pass.starts[r] + t, std::min(most, pass.counts[r] - t)});
  return tiles;
}

static void write(const Pass& pass, const Layer& layer, const Tile& tile, const Tensor3& k, const Tensor3& v) {
  for (long t = 0; t < tile.count; t++) {
    long position = tile.position + t, place = tile.place + t;
    long block = pass.tables[tile.row * pass.width + position / S];
    for (long h = 0; h < layer.K; h++) {
      long slot = (block * layer.K + h) * S + position % S;
      memcpy(layer.keys + slot * layer.E, k.at + place * k.token + h * k.head, sizeof(number) * layer.E);
      memcpy(layer.values + slot * layer.V, v.at + place * v.token + h * v.head, sizeof(number) * layer.V);
    }
  }
}

// Scores of Q queries with GROUP neighbouring keys.
template <int Q>
INLINE void dots(const number* const* query, const number* keys, long E, float* const* scores) {
  vec acc[Q][GROUP];
  UNROLL for (int q = 0; q < Q; q++)
    UNROLL for (int j = 0; j < GROUP; j++) acc[q][j] = vec{};
  long e = 0;
  for (; e + PAIR * LANES <= E; e += PAIR * LANES) {
    pairs a[Q];
    UNROLL for (int q = 0; q < Q; q++) {
      a[q] = load_pairs(query[q] + e);
      HOLD(a[q]);
    }
    UNROLL for (int j = 0; j < GROUP; j++) {
      pairs key = load_pairs(keys + j * E + e);
      HOLD(key);
      UNROLL for (int q = 0; q < Q; q++) acc[q][j] = add_products(acc[q][j], a[q], key);
    }
  }
  if (e < E)
    for (int q = 0; q < Q; q++)
      for (int j = 0; j < GROUP; j++)
        acc[q][j] = add_products(acc[q][j], load_pairs(query[q] + e, E - e), load_pairs(keys + j * E + e, E - e));
  UNROLL for (int q = 0; q < Q; q++) *(quad*)scores[q] = sum4(acc[q][0], acc[q][1], acc[q][2], acc[q][3]);
}

struct Query {
  const number* at;
  number* out;
  long first, last;  // positions it sees: [first, last)
  float most, sink;  // the largest score so far
  vec total;         // lane by lane, the sum of exp(score - most)
  float scores[STRETCH];
  float* sums;  // [V]
};

// Scores -> weights of positions [from, from + STRETCH); what was summed before moves to the new maximum.
static void weigh(Query& q, const Layer& layer, long from) {
  vec high = all(NONE);
  for (long i = 0; i < STRETCH; i += LANES) {
    if (from + i + LANES <= q.first || from + i >= q.last) {
      store(q.scores + i, all(NONE));
      continue;
    }
    vec s = load(q.scores + i) * layer.scale;
    if (layer.softcap > 0) s = (1.0f - 2.0f / (exp(s * (2.0f / layer.softcap)) + 1.0f)) * layer.softcap;  // tanh
    if (from + i < q.first || from + i + LANES > q.last)
      for (long j = 0; j < LANES; j++)
        if (from + i + j < q.first || from + i + j >= q.last) s[j] = NONE;
    store(q.scores + i, s);
    high = max(high, s);
  }
  float most = std::max(q.most, largest(high));
  float fade = exp(all(q.most - most))[0];
  q.total *= fade;
  for (long i = 0; i < layer.V; i++) q.sums[i] *= fade;
  for (long i = 0; i < STRETCH; i += LANES) {
    if (from + i + LANES <= q.first || from + i >= q.last) continue;
    vec w = exp(load(q.scores + i) - most);
    store(q.scores + i, w);
    q.total += w;
  }
  q.most = most;
}

INLINE void fetch(const number* p, long numbers) {
  for (long i = 0; i < numbers; i += LINE) __builtin_prefetch(p + i, 0, 2);
}

// sums += weights · values for Q queries that see the same positions, C vectors of the value's columns. `each` numbers
// from `ahead` on are fetched beside each position.
template <int Q, int C, class Get>
INLINE void gather(Query* const* query, const number* values, long V, long column, long n, long weight,
                   const number* ahead, long each, Get&& get) {
  vec acc[Q][C];
  UNROLL for (int q = 0; q < Q; q++)
    UNROLL for (int c = 0; c < C; c++) acc[q][c] = get(query[q]->sums + column + c * LANES);
  for (long i = 0; i < n; i++) {
    fetch(ahead + i * each, each);
    UNROLL for (int c = 0; c < C; c++) {
      vec v = get(values + i * V + column + c * LANES);
      HOLD(v);
      UNROLL for (int q = 0; q < Q; q++) acc[q][c] += v * query[q]->scores[weight + i];
    }
  }
  UNROLL for (int q = 0; q < Q; q++)
    UNROLL for (int c = 0; c < C; c++) {
      float* to = query[q]->sums + column + c * LANES;
      if (C == 1) store(to, acc[q][c], std::min<long>(LANES, V - column)); else store(to, acc[q][c]);
    }
}

// The values of one block: positions [from, from + S), of which [lo, hi) are seen. E numbers from `ahead` on (null:
// none) are fetched beside each.
template <int Q>
static void sum_block(Query* const* query, const number* values, long V, long lo, long hi, long weight,
                      const number* ahead, long E) {
  auto whole = [](auto p) __attribute__((always_inline)) { return load(p); };
  long c = 0, each = ahead ? E : 0;
  values += lo * V;
  for (; c + 4 * LANES <= V; c += 4 * LANES)
    gather<Q, 4>(query, values, V, c, hi - lo, weight + lo, ahead, each, whole), each = 0;
  for (; c + 2 * LANES <= V; c += 2 * LANES)
    gather<Q, 2>(query, values, V, c, hi - lo, weight + lo, ahead, each, whole), each = 0;
  for (; c < V; c += LANES) {
    long n = std::min<long>(LANES, V - c);
    gather<Q, 1>(query, values, V, c, hi - lo, weight + lo, ahead, each, [&](auto p) { return load(p, n); }), each = 0;
  }
}

// The scores of one block's places [lo, hi). Its values, of V numbers each, are fetched meanwhile.
static void score_block(Query* queries, long num, const number* keys, long E, long lo, long hi, long weight,
                        const number* values, long V) {
  const number* at[SHARE];
  float* to[SHARE];
  for (long i = lo / GROUP * GROUP; i < hi; i += GROUP) {
    fetch(values + i * V, GROUP * V);
    for (long q = 0; q < num;) {
      long share = std::min<long>(SHARE, num - q);
      for (int j = 0; j < share; j++) at[j] = queries[q + j].at, to[j] = queries[q + j].scores + weight + i;
      const number* from = keys + i * E;
      if (share == SHARE) dots<SHARE>(at, from, E, to), q += SHARE;
      else if (share >= 2) dots<2>(at, from, E, to), q += 2;
      else dots<1>(at, from, E, to), q += 1;
    }
  }
}

static void finish(const Query& q, long V) {
  float most = std::max(q.most, q.sink), fade = exp(all(q.most - most))[0];
  float total = sum(q.total) * fade + (q.sink > NONE ? exp(all(q.sink - most))[0] : 0.0f);
  by_vectors(V, [&](long i, long n) { store(q.out + i, load(q.sums + i, n) * fade / total, n); });
}

INLINE long first_seen(const Layer& layer, long position) {
  long first = layer.chunk ? position / layer.chunk * layer.chunk : 0;
  return layer.window ? std::max(first, position + 1 - layer.window) : first;
}

struct Work {  // (tile, head) pairs, taken from the last to the first
  const Pass& pass;
  const Layer& layer;
  const std::vector<Tile>& tiles;

  const Tile& tile(long pair) const { return tiles[pair / layer.K]; }
  const int* table(long pair) const { return pass.tables + tile(pair).row * pass.width; }
  long low(long pair) const { return first_seen(layer, tile(pair).position) / S; }
  long high(long pair) const { return (tile(pair).position + tile(pair).count + S - 1) / S; }
};

// The keys that come DISTANCE blocks after those in work, in this pair or the next, down to pair `begin`.
struct Ahead {
  const Work& work;
  long pair, begin, block;

  void skip() {
    if (++block >= work.high(pair) && --pair >= begin) block = work.low(pair);
  }
  const number* next() {
    if (pair < begin) return nullptr;
    const Layer& layer = work.layer;
    const number* at = layer.keys + (work.table(pair)[block] * layer.K + pair % layer.K) * S * layer.E;
    skip();
    return at;
  }
};

// The num queries of one pair's tile, G of each token, over the cache of its head.
static void attend(Query* queries, long num, long G, const Work& work, long pair, Ahead& keys) {
  const Layer& layer = work.layer;
  long first = queries[0].first, last = queries[num - 1].last, high = work.high(pair);
  auto place = [&](long b) { return (work.table(pair)[b] * layer.K + pair % layer.K) * S; };
  for (long from = first / STRETCH * STRETCH; from < last; from += STRETCH) {
    long low = std::max(from, first) / S, end = std::min((from + STRETCH) / S, high);
    for (long b = low; b < end; b++) {
      score_block(queries, num, layer.keys + place(b) * layer.E, layer.E, std::max(first - b * S, 0L),
                  std::min<long>(last - b * S, S), b * S - from, layer.values + place(b) * layer.V, layer.V);
    }
    for (long q = 0; q < num; q++)
      if (queries[q].first < from + STRETCH && queries[q].last > from) weigh(queries[q], layer, from);
    for (long b = low; b < end; b++) {
      const number* ahead = keys.next();
      for (long q = 0; q < num;) {
        long lo = std::max(queries[q].first - b * S, 0L), hi = std::min<long>(queries[q].last - b * S, S);
        bool two = q % G + 1 < G;  // neighbours of one token
        Query* pair[2] = {queries + q, queries + q + 1};
        const number* values = layer.values + place(b) * layer.V;
        if (lo < hi) {
          (two ? sum_block<2> : sum_block<1>)(pair, values, layer.V, lo, hi, b * S - from, ahead, layer.E);
          ahead = nullptr;
        }
        q += two ? 2 : 1;
      }
    }
  }
  for (long q = 0; q < num; q++) finish(queries[q], layer.V);
}

static std::vector<Tile> tiles_of(const Pass& pass, const Layer& layer) {
  return cut(pass, std::max<long>(1, QUERIES * layer.K / layer.H));
}

// Tasks are neighbouring pairs, so that one can fetch for the next. The longest contexts of a prefill come first.
ONCE void attention(Member& me, long threads, const Work& work, const Tensor3& query, number* out) {
  const Layer& layer = work.layer;
  const long G = layer.H / layer.K, total = work.tiles.size() * layer.K, share = std::max(1L, total / (threads * 8));
  std::vector<Query> queries(std::max<long>(QUERIES, G));
  std::vector<float> sums(queries.size() * layer.V);
  me.each((total + share - 1) / share, [&](long task) {
    const long end = total - task * share, begin = std::max(0L, end - share);
    Ahead keys{work, end - 1, begin, work.low(end - 1)};
    for (int i = 0; i < DISTANCE && keys.pair >= begin; i++) keys.skip();
    for (long pair = end - 1; pair >= begin; pair--) {
      const Tile& tile = work.tile(pair);
      long head = pair % layer.K, num = 0;
      std::fill(sums.begin(), sums.end(), 0.0f);
      for (long t = 0; t < tile.count; t++)
        for (long h = head * G; h < (head + 1) * G; h++, num++) {
          long place = tile.place + t, position = tile.position + t;
          Query& q = queries[num];
          q.at = query.at + place * query.token + h * query.head;
          q.out = out + (place * layer.H + h) * layer.V;
          q.first = first_seen(layer, position), q.last = position + 1;
          q.most = NONE, q.sink = layer.sinks ? wide(layer.sinks[h]) : NONE;
          q.total = vec{}, q.sums = sums.data() + num * layer.V;
        }
      attend(queries.data(), num, G, work, pair, keys);
    }
  });
}
