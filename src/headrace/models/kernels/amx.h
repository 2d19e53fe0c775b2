// Products in bfloat16 by the matrix unit of x86 processors (AMX). Its eight registers are tiles of up to 16 rows of 64
// bytes: 0 to 3 hold sums of up to 32 tokens and a panel, 4 and 5 their x, 6 and 7 the weights.
#pragma once
#if defined(BFLOAT16) && defined(__AMX_BF16__) && defined(__linux__)
#define MATRIX_UNIT
#include <immintrin.h>
#include <sys/syscall.h>
#include <unistd.h>
#include "vec.h"

enum { ROWS = 16, DEPTH = 32, MOST = 2 * ROWS };  // of a tile; numbers of k in a row of one; tokens at once

// Linux lets a process use the tiles that asks for them.
static bool has_tiles() {
  static const bool granted = !syscall(SYS_arch_prctl, 0x1023, 18);  // ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA
  return granted;
}

struct alignas(64) TileShapes {
  unsigned char palette = 1, first = 0, none[14] = {};
  unsigned short bytes[16] = {};
  unsigned char rows[16] = {};

  void set(int tile, long count) { rows[tile] = count, bytes[tile] = count ? 64 : 0; }
};
static thread_local long tiles_for = 0;  // tokens

static void shape_tiles(long tokens) {
  if (tiles_for == tokens) return;
  const long low = std::min<long>(tokens, ROWS), high = tokens - low;
  TileShapes shapes;
  for (int tile : {0, 1, 4}) shapes.set(tile, low);
  for (int tile : {2, 3, 5}) shapes.set(tile, high);
  for (int tile : {6, 7}) shapes.set(tile, ROWS);
  asm volatile("" ::"r"(&shapes) : "memory");  // to the compiler, tiles and shapes are read from nowhere
  _tile_loadconfig(&shapes);
  tiles_for = tokens;
}

// Others may shape the tiles of this thread between two calls.
static void leave_tiles() {
  if (tiles_for) _tile_release();
  tiles_for = 0;
}

// The products of DEPTH numbers of k are added. TWO: there are more than ROWS tokens.
template <bool TWO>
INLINE void add_tiles(const number* x, long ldx, const number* weights) {
  enum { WIDTH = 4 * PANEL };  // bytes from one pair of k to the next in a panel
  _tile_loadd(6, weights, WIDTH);
  _tile_loadd(7, weights + PAIR * ROWS, WIDTH);
  _tile_loadd(4, x, 2 * ldx);
  _tile_dpbf16ps(0, 4, 6);
  _tile_dpbf16ps(1, 4, 7);
  if (!TWO) return;
  _tile_loadd(5, x + ROWS * ldx, 2 * ldx);
  _tile_dpbf16ps(2, 5, 6);
  _tile_dpbf16ps(3, 5, 7);
}

// sums [tokens, PANEL] of K numbers, a panel whose depth is rounded up to DEPTH with zeros. `meanwhile` is called at each step.
template <bool TWO, class F>
static void sum_tiles(const number* x, long ldx, long tokens, long K, const number* panel, float* sums, F& meanwhile) {
  alignas(64) number rest[MOST * DEPTH];  // beyond a row, another begins, of numbers that may not be finite
  const long whole = K / DEPTH * DEPTH;
  if (whole < K) {
    memset(rest, 0, sizeof(rest));
    for (long i = 0; i < tokens; i++) memcpy(rest + i * DEPTH, x + i * ldx + whole, 2 * (K - whole));
  }
  asm volatile("" ::: "memory");
  _tile_zero(0);
  _tile_zero(1);
  if (TWO) {
    _tile_zero(2);
    _tile_zero(3);
  }
  for (long k = 0; k < whole; k += DEPTH) {
    meanwhile();
    add_tiles<TWO>(x + k, ldx, panel + k * PANEL);
  }
  if (whole < K) add_tiles<TWO>(rest, DEPTH, panel + whole * PANEL);
  _tile_stored(0, sums, 4 * PANEL);
  _tile_stored(1, sums + LANES, 4 * PANEL);
  if (TWO) {
    _tile_stored(2, sums + ROWS * PANEL, 4 * PANEL);
    _tile_stored(3, sums + ROWS * PANEL + LANES, 4 * PANEL);
  }
  asm volatile("" ::: "memory");
}
#endif
