#include "layer_skip/matrix_unit.h"

#if defined(__x86_64__)
#include <immintrin.h>

#include "cpu_level.h"
#endif

namespace viasd {

#if defined(__x86_64__)

namespace {

// Registers: 0 to 3 hold sums, 4 and 5 activations, 6 and 7 weights.
struct alignas(64) TileConfig {
    uint8_t palette = 1, start_row = 0, reserved[14] = {};
    uint16_t bytes_per_row[16] = {64, 64, 64, 64, 64, 64, 64, 64};
    uint8_t rows[16] = {16, 16, 16, 16, 16, 16, 16, 16};
};

// Tiles of inputs taken at a time: with as many, the activations of 32 rows stay in the first-level cache while the
// weights of all panels pass by, which come from the second.
constexpr int64_t DEPTH_BLOCK = 16;

void begin() {
    static constexpr TileConfig CONFIG;
    _tile_loadconfig(&CONFIG);
}

void end() { _tile_release(); }

void put(float* tiles, int64_t width, int64_t row, int64_t first, const float* values, int64_t count) {
    const int64_t num_tiles = round_up(width, UNIT_INPUTS) / UNIT_INPUTS;
    char* base =
        reinterpret_cast<char*>(tiles) + row / UNIT_ROWS * num_tiles * UNIT_TILE + row % UNIT_ROWS * UNIT_INPUTS * 2;
    const int64_t end = first + count;
    for (int64_t k = first; k < end;) {
        const int64_t offset = k % UNIT_INPUTS, inside = UNIT_INPUTS - offset < 16 ? UNIT_INPUTS - offset : 16;
        const int64_t size = end - k < inside ? end - k : inside;
        const __mmask16 mask = static_cast<__mmask16>((1u << size) - 1);
        const __m256bh rounded = _mm512_cvtneps_pbh(_mm512_maskz_loadu_ps(mask, values + (k - first)));
        _mm256_mask_storeu_epi16(base + k / UNIT_INPUTS * UNIT_TILE + offset * 2, mask, (__m256i)rounded);
        k += size;
    }
    if (end == width && width % UNIT_INPUTS) {
        char* last = base + (num_tiles - 1) * UNIT_TILE + width % UNIT_INPUTS * 2;
        __builtin_memset(last, 0, (UNIT_INPUTS - width % UNIT_INPUTS) * 2);
    }
}

void shorten(const float* panel, int64_t depth, void* out) {
    for (int64_t k = 0; k < depth; k += 2) {
        const __m512i first = _mm512_loadu_si512(panel + k * PANEL);
        const __m512i second = k + 1 < depth ? _mm512_loadu_si512(panel + (k + 1) * PANEL) : _mm512_setzero_si512();
        const __m512i pairs = _mm512_mask_blend_epi16(0xAAAAAAAA, _mm512_maskz_srli_epi32(0xFFFF, first, 16), second);
        _mm512_storeu_si512(static_cast<char*>(out) + k / 2 * PANEL * 4, pairs);
    }
}

// Panels as tiles. Where the depth is no multiple of 32, a panel's last tile is a copy filled up with zeros.
class Weights {
  public:
    Weights(const void* panels, int64_t num_panels, int64_t depth)
        : panels_(static_cast<const char*>(panels)),
          stride_(panel_bytes(Coding::BFLOAT16, depth)),
          last_panel_(num_panels - 1),
          num_whole_(depth / UNIT_INPUTS) {
        const int64_t whole = num_whole_ * UNIT_TILE;
        for (int64_t p = 0; p < num_panels && whole < stride_; ++p) {
            __builtin_memcpy(last_[p], panels_ + p * stride_ + whole, stride_ - whole);
            __builtin_memset(last_[p] + (stride_ - whole), 0, UNIT_TILE - (stride_ - whole));
        }
        asm volatile("" : : "r"(last_) : "memory");  // compilers do not know that loading a tile reads memory
    }

    int64_t num_tiles() const { return num_whole_ + (num_whole_ * UNIT_TILE < stride_); }

    // A panel past the last one is the last one once more, whose products nobody stores.
    const char* tile(int64_t panel, int64_t t) const {
        const int64_t p = panel < last_panel_ ? panel : last_panel_;
        return t < num_whole_ ? panels_ + p * stride_ + t * UNIT_TILE : last_[p];
    }

  private:
    const char* panels_;
    int64_t stride_, last_panel_, num_whole_;
    alignas(64) char last_[TILE_PANELS][UNIT_TILE];
};

// 16 rows times the panels p to p + 3.
void multiply_few(const Weights& weights, int64_t p, int64_t num_stored, const char* x, float* y, int64_t y_stride) {
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
    for (int64_t t = 0; t < weights.num_tiles(); ++t) {
        _tile_loadd(4, x + t * UNIT_TILE, 64);
        _tile_loadd(6, weights.tile(p, t), 64);
        _tile_loadd(7, weights.tile(p + 1, t), 64);
        _tile_dpbf16ps(0, 4, 6);
        _tile_dpbf16ps(1, 4, 7);
        _tile_loadd(6, weights.tile(p + 2, t), 64);
        _tile_loadd(7, weights.tile(p + 3, t), 64);
        _tile_dpbf16ps(2, 4, 6);
        _tile_dpbf16ps(3, 4, 7);
    }
    _tile_stored(0, y, y_stride * 4);
    if (num_stored > 1) _tile_stored(1, y + PANEL, y_stride * 4);
    if (num_stored > 2) _tile_stored(2, y + 2 * PANEL, y_stride * 4);
    if (num_stored > 3) _tile_stored(3, y + 3 * PANEL, y_stride * 4);
}

// 32 rows, of which the second half lies `next` bytes on, times the panels p and p + 1; inputs in the tiles from
// `begin`, where sums start anew if it is 0, to `end`.
void multiply_many(const Weights& weights, int64_t p, int64_t num_stored, const char* x, int64_t next, int64_t begin,
                   int64_t end, float* y, int64_t y_stride) {
    float* below = y + UNIT_ROWS * y_stride;
    const int64_t second = num_stored > 1 ? PANEL : 0;
    if (begin == 0) {
        _tile_zero(0);
        _tile_zero(1);
        _tile_zero(2);
        _tile_zero(3);
    } else {
        _tile_loadd(0, y, y_stride * 4);
        _tile_loadd(1, y + second, y_stride * 4);
        _tile_loadd(2, below, y_stride * 4);
        _tile_loadd(3, below + second, y_stride * 4);
    }
    for (int64_t t = begin; t < end; ++t) {
        _tile_loadd(4, x + t * UNIT_TILE, 64);
        _tile_loadd(5, x + next + t * UNIT_TILE, 64);
        _tile_loadd(6, weights.tile(p, t), 64);
        _tile_loadd(7, weights.tile(p + 1, t), 64);
        _tile_dpbf16ps(0, 4, 6);
        _tile_dpbf16ps(1, 4, 7);
        _tile_dpbf16ps(2, 5, 6);
        _tile_dpbf16ps(3, 5, 7);
    }
    _tile_stored(0, y, y_stride * 4);
    _tile_stored(2, below, y_stride * 4);
    if (num_stored > 1) {
        _tile_stored(1, y + PANEL, y_stride * 4);
        _tile_stored(3, below + PANEL, y_stride * 4);
    }
}

void multiply(const void* panels, int64_t num_panels, int64_t depth, const float* tiles, int64_t num_rows, float* y,
              int64_t y_stride) {
    const Weights weights(panels, num_panels, depth);
    const int64_t row_bytes = weights.num_tiles() * UNIT_TILE;  // of 16 rows
    const int64_t num_row_tiles = round_up(num_rows, UNIT_ROWS) / UNIT_ROWS;
    const char* x = reinterpret_cast<const char*>(tiles);
    for (int64_t r = 0; r + 1 < num_row_tiles; r += 2) {
        for (int64_t begin = 0; begin < weights.num_tiles(); begin += DEPTH_BLOCK) {
            const int64_t block_end = begin + DEPTH_BLOCK;
            const int64_t end = block_end < weights.num_tiles() ? block_end : weights.num_tiles();
            for (int64_t p = 0; p < num_panels; p += 2) {
                multiply_many(weights, p, num_panels - p, x + r * row_bytes, row_bytes, begin, end,
                              y + r * UNIT_ROWS * y_stride + p * PANEL, y_stride);
            }
        }
    }
    for (int64_t p = 0; p < num_panels && num_row_tiles % 2; p += 4) {
        const int64_t r = num_row_tiles - 1;
        multiply_few(weights, p, num_panels - p, x + r * row_bytes, y + r * UNIT_ROWS * y_stride + p * PANEL, y_stride);
    }
}

}  // namespace

const MatrixUnit* matrix_unit() {
    static constexpr MatrixUnit UNIT = {begin, end, put, shorten, multiply};
    return cpu_level() == CpuLevel::AMX ? &UNIT : nullptr;
}

#else

const MatrixUnit* matrix_unit() { return nullptr; }

#endif

}  // namespace viasd
