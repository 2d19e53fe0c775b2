// What Python calls (headrace.models.kernels.ops).
#include "linear.h"
#include "paged.h"
#ifndef BFLOAT16
#include "recurrent.h"
#endif

enum { GAP = LINE };  // numbers between the inner rows of an MLP: a page apart, they would share a few lines of the cache
static const double ALONE = 2e5;  // multiplications that are done before a second thread has come

struct Block {  // what decoder layers have in common; of the products only w, panels, bias, N and lora are given
  Norm before, after;
  Part out, gate, up, down;
};
struct Decoder {  // a layer that attends; `gated`: each head of q is followed by the gate of its output
  Block block;
  Norm query, key;
  Part in[3];  // q, k, v
  long gated;
};
#ifndef BFLOAT16
struct DeltaDecoder {  // a layer with the gated delta rule
  Block block;
  DeltaNet net;
  Part in[4];  // q k v, z, b, a
};
#endif
struct Weight {  // w [N, K], and where its panels go
  const number* w;
  number* panels;
  long N, K;
};
struct Step {
  const number* x;        // [M, q.K]
  number *y, *scratch;    // y as x; scratch: M · scratch_size numbers (decoder.py)
  Turn turn;
  long M, hidden;
};

// The layer around `mix`, which gets the products `in` of each token and leaves `size` numbers of each.
template <class Mix>
static void decoder(const Step& step, Block b, Part* in, long num_in, long size, int threads, Mix&& mix) {
  const long M = step.M, D = step.hidden;
  long width = 0;
  for (long i = 0; i < num_in; i++) width += in[i].N;
  Narrow narrow;
  narrow.give(M, {{in, num_in}, {&b.out, 1}, {&b.gate, 1}, {&b.up, 1}, {&b.down, 1}});
  number *x = step.scratch, *rows = x + M * D, *mixed = rows + M * width, *inner = mixed + M * size;
  for (long i = 0, at = 0; i < num_in; at += in[i++].N) in[i].y = rows + at, in[i].ldy = width;
  b.out.add = step.x, b.down.add = step.y, b.out.y = b.down.y = step.y, b.out.ldy = b.down.ldy = D;
  b.gate.ldy = b.up.ldy = b.gate.N + GAP, b.gate.y = inner, b.up.y = inner + M * b.gate.ldy;
  auto normalise = [&](Member& me, const number* from, const Norm& norm) {
    tokens(me, M, [&](long m) { normed(from + m * D, norm, x + m * D, D); });
  };
  together(M * (D * width + 3 * D * b.gate.N) < ALONE ? 1 : threads, [&](Member& me) {
    normalise(me, step.x, b.before);
    products(me, {x, D, M, D}, in, num_in);
    mix(me, rows, width, mixed);
    products(me, {mixed, size, M, size}, &b.out, 1);
    normalise(me, step.y, b.after);
    gated(me, {x, D, M, D}, b.gate, b.up, b.down);
  });
}

extern "C" {

// What multiplies.
const char* hr_unit() {
#ifdef MATRIX_UNIT
  if (has_tiles()) return "AMX";
#endif
  return PAIR == 1 || !DOT_PRODUCTS ? "float32" : "AVX-512 BF16";
}

// The numbers of the panels of a weight.
long hr_panels(long N, long K) { return count_panels(N) * PANEL * deep(K); }

void hr_pack(const Weight* weights, long num, int threads) {
  together(threads, [&](Member& me) {
    me.each(num, [&](long i) {
      const Weight& each = weights[i];
      for (long n = 0; n < each.N; n += PANEL) pack(each.w, each.N, each.K, n, each.panels + n * deep(each.K));
    });
  });
}

// Several products with one x.
void hr_linear(const Input* in, const Part* parts, long num_parts, int threads) {
  double work = 0;
  for (long i = 0; i < num_parts; i++) work += (double)in->M * in->K * parts[i].N;
  std::vector<Part> own(parts, parts + num_parts);
  Narrow narrow;
  narrow.give(in->M, {{own.data(), num_parts}});
  together(work < ALONE ? 1 : threads, [&](Member& me) { products(me, *in, own.data(), num_parts); });
}

void hr_gated(const Input* in, const Part* gate, const Part* up, const Part* down, int threads) {
  double work = 3.0 * in->M * in->K * gate->N;
  Part own[] = {*gate, *up, *down};
  Narrow narrow;
  narrow.give(in->M, {{own, 3}});
  together(work < ALONE ? 1 : threads, [&](Member& me) { gated(me, *in, own[0], own[1], own[2]); });
}

void hr_norm(const Input* in, const Norm* norm, number* y, int threads) {
  together(in->M * in->K < 65536 ? 1 : threads, [&](Member& me) {
    tokens(me, in->M, [&](long m) { normed(in->x + m * in->ldx, *norm, y + m * in->K, in->K); });
  });
}

// In place: the heads of M tokens, ldx from token to token, `apart` from head to head.
void hr_heads(number* x, long ldx, long apart, long M, long num, long E, const Norm* norm, const Turn* turn,
              int threads) {
  together(M * num * E < 65536 ? 1 : threads, [&](Member& me) {
    tokens(me, M, [&](long m) { heads(x + m * ldx, num, E, apart, *norm, *turn, m); });
  });
}

// In place: [M, num, V] times the sigmoids of `gate`.
void hr_gate(number* x, const Tensor3* gate, long M, long num, long V, int threads) {
  together(M * num * V < 65536 ? 1 : threads, [&](Member& me) {
    tokens(me, M, [&](long m) { gate_heads(x + m * num * V, gate->at + m * gate->token, num, V, gate->head); });
  });
}

void hr_paged(const Pass* pass, const Layer* layer, const Tensor3* qkv, number* out, int threads) {
  const std::vector<Tile> tiles = tiles_of(*pass, *layer);
  together(threads, [&](Member& me) {
    me.each(tiles.size(), [&](long i) { write(*pass, *layer, tiles[i], qkv[1], qkv[2]); });
    attention(me, threads, {*pass, *layer, tiles}, qkv[0], out);
  });
}

// Decoder layers: y = x + out · mix(norm(x)), then y + mlp(norm(y)). The same operations as those above.
void hr_decoder(const Step* step, const Decoder* given, const Pass* pass, const Layer* layer, int threads) {
  const long H = layer->H, K = layer->K, E = layer->E, V = layer->V, apart = given->gated ? 2 * E : E;
  const std::vector<Tile> tiles = tiles_of(*pass, *layer);
  Decoder d = *given;
  decoder(*step, d.block, d.in, 3, H * V, threads, [&](Member& me, number* rows, long width, number* mixed) {
    const Tensor3 query{rows, width, apart}, key{rows + H * apart, width, E}, value{key.at + K * E, width, V};
    me.each(tiles.size(), [&](long i) {
      for (long m = tiles[i].place; m < tiles[i].place + tiles[i].count; m++) {
        heads(query.at + m * width, H, E, apart, d.query, step->turn, m);
        heads(key.at + m * width, K, E, E, d.key, step->turn, m);
      }
      write(*pass, *layer, tiles[i], key, value);
    });
    attention(me, threads, {*pass, *layer, tiles}, query, mixed);
    if (!d.gated) return;
    tokens(me, step->M, [&](long m) { gate_heads(mixed + m * H * V, query.at + m * width + E, H, V, apart); });
  });
}


#ifndef BFLOAT16
void hr_log_softmax(const Input* in, float* y, int threads) {
  together(in->M * in->K < 65536 ? 1 : threads, [&](Member& me) {
    tokens(me, in->M, [&](long m) { log_softmax(in->x + m * in->ldx, y + m * in->K, in->K); });
  });
}

void hr_convolve(const Slots* slots, const Filter* filter, const float* x, long ldx, float* out, int threads) {
  together(slots->R * filter->C * filter->W < 65536 ? 1 : threads, [&](Member& me) {
    me.each(slots->R, [&](long r) { convolve(*slots, *filter, x, ldx, out, filter->C, r); });
  });
}

void hr_delta(const Slots* slots, const Heads* qkv, const float* decay, const float* rate, int normed, float* out,
              int threads) {
  const long H = qkv[2].heads, G = qkv[1].heads, K = qkv[1].size, V = qkv[2].size, work = slots->R * H * V * K;
  together(work < 65536 ? 1 : threads, [&](Member& me) {
    me.each(slots->R * H, [&](long i) {
      const long g = i / H * G + i % H / (H / G), slot = slots->of[i / H] * H + i % H;
      const Token token{qkv[0].at + g * K, qkv[1].at + g * K, qkv[2].at + i * V, 0, 0, std::exp(decay[i]), rate[i]};
      delta(slots->pool + slot * K * V, token, K, V, normed, out + i * V);
    });
  });
}

// [R, ldy] to [R, H V].
void hr_delta_net(const DeltaNet* net, float* rows, long ldy, float* out, int threads) {
  const long work = net->R * net->H * net->V * net->K;
  together(work < 65536 ? 1 : threads, [&](Member& me) { delta_net(me, *net, rows, ldy, out, net->H * net->V); });
}

void hr_scan(const Slots* slots, const Heads* x, const float* step, const Heads* bc, const float* rate,
             const float* skip, float* out, int threads) {
  const long H = x->heads, work = slots->R * H * x->size * bc[0].size;
  together(work < 65536 ? 1 : threads, [&](Member& me) {
    me.each(slots->R * H, [&](long i) { scan(*slots, *x, step, bc, rate, skip, out, i / H, i % H); });
  });
}

void hr_select(const Slots* slots, const Heads* x, const float* step, const Heads* bc, const float* rate, float* out,
               int threads) {
  together(slots->R * x->size * bc[0].size < 65536 ? 1 : threads, [&](Member& me) {
    me.each(slots->R, [&](long r) { select(*slots, *x, step, bc, rate, out, r); });
  });
}

// All rows have one token each.
void hr_delta_decoder(const Step* step, const DeltaDecoder* given, int threads) {
  DeltaDecoder d = *given;
  const long mixed_size = d.net.H * d.net.V;
  decoder(*step, d.block, d.in, 4, mixed_size, threads, [&](Member& me, number* rows, long width, number* mixed) {
    delta_net(me, d.net, rows, width, mixed, mixed_size);
  });
}
#endif
}
