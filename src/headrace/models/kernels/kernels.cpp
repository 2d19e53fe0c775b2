// What Python calls (headrace.models.kernels.ops).
#include "linear.h"
#include "paged.h"
#include "recurrent.h"

enum { GAP = 16 };  // numbers between the inner rows of an MLP: a page apart, they would share a few lines of the cache
static const double ALONE = 2e5;  // multiplications that are done before a second thread has come

struct Decoder {  // the parts of a decoder layer; of the products only w, panels, bias and N are given
  Norm before, after, query, key;
  Part q, k, v, out, gate, up, down;
};
struct Weight {  // w [N, K], and where its panels go
  const float* w;
  float* panels;
  long N, K;
};
struct Step {
  const float* x;        // [M, q.K]
  float *y, *scratch;    // y as x; scratch: M · scratch_size numbers (decoder.py)
  Turn turn;
  long M, hidden;
};

extern "C" {

int hr_panel() { return PANEL; }

void hr_pack(const Weight* weights, long num, int threads) {
  together(threads, [&](Member& me) {
    me.each(num, [&](long i) {
      const Weight& each = weights[i];
      for (long n = 0; n < each.N; n += PANEL) pack(each.w, each.N, each.K, n, each.panels + n * each.K);
    });
  });
}

// Several products with one x.
void hr_linear(const Input* in, const Part* parts, long num_parts, int threads) {
  double work = 0;
  for (long i = 0; i < num_parts; i++) work += (double)in->M * in->K * parts[i].N;
  together(work < ALONE ? 1 : threads, [&](Member& me) { products(me, *in, parts, num_parts); });
}

void hr_gated(const Input* in, const Part* gate, const Part* up, const Part* down, int threads) {
  double work = 3.0 * in->M * in->K * gate->N;
  together(work < ALONE ? 1 : threads, [&](Member& me) { gated(me, *in, *gate, *up, *down); });
}

void hr_norm(const Input* in, const Norm* norm, float* y, int threads) {
  together(in->M * in->K < 65536 ? 1 : threads, [&](Member& me) {
    tokens(me, in->M, [&](long m) { normed(in->x + m * in->ldx, *norm, y + m * in->K, in->K); });
  });
}

// In place: the heads of M tokens, ldx apart.
void hr_heads(float* x, long ldx, long M, long num, long E, const Norm* norm, const Turn* turn, int threads) {
  together(M * num * E < 65536 ? 1 : threads, [&](Member& me) {
    tokens(me, M, [&](long m) { heads(x + m * ldx, num, E, *norm, *turn, m); });
  });
}

void hr_log_softmax(const Input* in, float* y, int threads) {
  together(in->M * in->K < 65536 ? 1 : threads, [&](Member& me) {
    tokens(me, in->M, [&](long m) { log_softmax(in->x + m * in->ldx, y + m * in->K, in->K); });
  });
}

void hr_paged(const Pass* pass, const Layer* layer, const Tensor3* qkv, float* out, int threads) {
  const std::vector<Tile> tiles = tiles_of(*pass, *layer);
  together(threads, [&](Member& me) {
    me.each(tiles.size(), [&](long i) { write(*pass, *layer, tiles[i], qkv[1], qkv[2]); });
    attention(me, threads, {*pass, *layer, tiles}, qkv[0], out);
  });
}

void hr_convolve(const Slots* slots, const float* x, long ldx, const float* weight, const float* bias, long C, long W,
                 int silu, float* out, int threads) {
  together(slots->R * C * W < 65536 ? 1 : threads, [&](Member& me) {
    me.each(slots->R, [&](long r) { convolve(*slots, x, ldx, weight, bias, C, W, silu, out, r); });
  });
}

void hr_delta(const Slots* slots, const Heads* qkv, const float* decay, const float* rate, int normed, float* out,
              int threads) {
  const long H = qkv[2].heads, V = qkv[2].size, work = slots->R * H * V * qkv[1].size;
  together(work < 65536 ? 1 : threads, [&](Member& me) {
    std::vector<float> found(V);
    me.each(slots->R * H, [&](long i) { delta(*slots, qkv, decay, rate, normed, out, found.data(), i / H, i % H); });
  });
}

void hr_scan(const Slots* slots, const Heads* x, const float* step, const Heads* bc, const float* rate,
             const float* skip, float* out, int threads) {
  const long H = x->heads, work = slots->R * H * x->size * bc[0].size;
  together(work < 65536 ? 1 : threads, [&](Member& me) {
    me.each(slots->R * H, [&](long i) { scan(*slots, *x, step, bc, rate, skip, out, i / H, i % H); });
  });
}

// A decoder layer: y = x + out · attention(norm(x)), then y + mlp(norm(y)). The same operations as those above.
void hr_decoder(const Step* step, const Decoder* given, const Pass* pass, const Layer* layer, int threads) {
  const long M = step->M, D = step->hidden, H = layer->H, K = layer->K, E = layer->E, V = layer->V;
  const std::vector<Tile> tiles = tiles_of(*pass, *layer);
  Decoder d = *given;
  const long width = H * E + K * (E + V);
  float *x = step->scratch, *qkv = x + M * D, *mixed = qkv + M * width, *inner = mixed + M * H * V;
  const Tensor3 query{qkv, width, E}, key{qkv + H * E, width, E}, value{key.at + K * E, width, V};
  d.q.y = query.at, d.k.y = key.at, d.v.y = value.at, d.q.ldy = d.k.ldy = d.v.ldy = width;
  d.out.add = step->x, d.down.add = step->y, d.out.y = d.down.y = step->y, d.out.ldy = d.down.ldy = D;
  d.gate.ldy = d.up.ldy = d.gate.N + GAP, d.gate.y = inner, d.up.y = inner + M * d.gate.ldy;
  auto normalise = [&](Member& me, const float* from, const Norm& norm) {
    tokens(me, M, [&](long m) { normed(from + m * D, norm, x + m * D, D); });
  };
  together(M * (D * width + 3 * D * d.gate.N) < ALONE ? 1 : threads, [&](Member& me) {
    normalise(me, step->x, d.before);
    products(me, {x, D, M, D}, &d.q, 3);
    me.each(tiles.size(), [&](long i) {
      for (long m = tiles[i].place; m < tiles[i].place + tiles[i].count; m++) {
        heads(qkv + m * width, H, E, d.query, step->turn, m);
        heads(key.at + m * width, K, E, d.key, step->turn, m);
      }
      write(*pass, *layer, tiles[i], key, value);
    });
    attention(me, threads, {*pass, *layer, tiles}, query, mixed);
    products(me, {mixed, H * V, M, H * V}, &d.out, 1);
    normalise(me, step->y, d.after);
    gated(me, {x, D, M, D}, d.gate, d.up, d.down);
  });
}
}
