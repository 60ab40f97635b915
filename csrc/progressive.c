/* Reads one block's share of a scan (T.81, annex G): the first bits of coefficients, or one more bit of each. */
#include "block.h"
#include "coefficients.h"

static uint32_t read_bits(pl_band_reader *reader, uint32_t n) {
  if (n == 0) return 0;
  pl_bits_refill(&reader->bits, true);
  uint32_t value = (uint32_t)(reader->bits.window >> (64 - n));
  pl_bits_take(&reader->bits, n);
  return value;
}

static uint32_t read_symbol(pl_band_reader *reader, const pl_codes *codes) {
  pl_bits_refill(&reader->bits, true);
  uint32_t length = 0;
  int symbol = pl_symbol(codes, reader->bits.window, &length);
  pl_bits_take(&reader->bits, length);
  if (symbol >= 0) return (uint32_t)symbol;
  reader->wrong = true;
  return 0;
}

/* Read a number of `size` bits (T.81, F.2.2.1). */
static int32_t read_value(pl_band_reader *reader, uint32_t size) {
  int32_t value = (int32_t)read_bits(reader, size);
  return size == 0 || value >> (size - 1) != 0 ? value : value - (1 << size) + 1;
}

/* Multiply by 2^low; what does not fit a coefficient is wrong. */
static int16_t scaled(pl_band_reader *reader, int32_t value) {
  int32_t product = value * (1 << reader->scan->low);
  if (product == (int16_t)product) return (int16_t)product;
  reader->wrong = true;
  return 0;
}

/* Read the difference of the DC, and return the DC. */
static int32_t read_dc(pl_band_reader *reader, int component) {
  uint32_t size = read_symbol(reader, reader->dc);
  if (size > PL_MAX_DC_SIZE) {
    reader->wrong = true;
    return 0;
  }
  int32_t dc = reader->predictors[component] + read_value(reader, size);
  if (dc != (int16_t)dc) reader->wrong = true;
  return reader->predictors[component] = (int16_t)dc;
}

void pl_read_sequential(pl_band_reader *reader, int component, int16_t *block) {
  block[0] = (int16_t)read_dc(reader, component);
  for (uint32_t at = 1; at <= 63; at++) {
    uint32_t symbol = read_symbol(reader, reader->ac), run = symbol >> 4, size = symbol & 15;
    if (size == 0 && run != 15) return;
    at += run;
    if (at > 63 || size > PL_MAX_AC_SIZE) {
      reader->wrong = true;
      return;
    }
    block[pl_natural_order[at]] = (int16_t)read_value(reader, size);
  }
}

static void read_dc_first(pl_band_reader *reader, int component, int16_t *block) {
  block[0] = scaled(reader, read_dc(reader, component));
}

static void read_dc_more(pl_band_reader *reader, int component, int16_t *block) {
  (void)component;
  if (read_bits(reader, 1) != 0) block[0] = (int16_t)(block[0] | 1 << reader->scan->low);
}

/* Note that this block and some that follow end here: 2^run and `run` bits more of them. */
static void begin_run_of_ends(pl_band_reader *reader, uint32_t run) {
  reader->run_of_ends = (1u << run) + read_bits(reader, run);
}

static void read_ac_first(pl_band_reader *reader, int component, int16_t *block) {
  (void)component;
  uint32_t last = (uint32_t)reader->scan->last;
  for (uint32_t at = (uint32_t)reader->scan->first; at <= last && reader->run_of_ends == 0; at++) {
    uint32_t symbol = read_symbol(reader, reader->ac), run = symbol >> 4, size = symbol & 15;
    if (size == 0 && run != 15) {
      begin_run_of_ends(reader, run);
      break;
    }
    at += run;
    if (at > last || size > PL_MAX_AC_SIZE) {
      reader->wrong = true;
      return;
    }
    block[pl_natural_order[at]] = scaled(reader, read_value(reader, size));
  }
  if (reader->run_of_ends > 0) reader->run_of_ends--;
}

/* Read one more bit of a coefficient that is not zero. */
static void refine(pl_band_reader *reader, int16_t *coefficient) {
  int32_t bit = 1 << reader->scan->low;
  if (read_bits(reader, 1) == 0) return;
  *coefficient = (int16_t)(*coefficient < 0 ? *coefficient - bit : *coefficient + bit);
}

/* Refine coefficients from `at` on, until `run` zeros are passed and the next one is met, or the band ends. Return its
 * place. */
static uint32_t refine_run(pl_band_reader *reader, int16_t *block, uint32_t at, uint32_t run) {
  for (; at <= (uint32_t)reader->scan->last; at++) {
    int16_t *coefficient = &block[pl_natural_order[at]];
    if (*coefficient != 0) {
      refine(reader, coefficient);
    } else if (run-- == 0) {
      break;
    }
  }
  return at;
}

static void read_ac_more(pl_band_reader *reader, int component, int16_t *block) {
  (void)component;
  const uint32_t last = (uint32_t)reader->scan->last, whole_band = 64;
  uint32_t at = (uint32_t)reader->scan->first;
  while (at <= last && reader->run_of_ends == 0) {
    uint32_t symbol = read_symbol(reader, reader->ac), run = symbol >> 4, size = symbol & 15;
    if (size == 0 && run != 15) {
      begin_run_of_ends(reader, run);
      break;
    }
    // The new coefficient's sign stands before the bits of those passed on the way to it.
    int32_t value = size == 0 ? 0 : read_bits(reader, 1) != 0 ? 1 : -1;
    at = refine_run(reader, block, at, run);
    if (size > 1 || (at > last && size != 0)) {
      reader->wrong = true;
      return;
    }
    if (size != 0) block[pl_natural_order[at]] = (int16_t)(value * (1 << reader->scan->low));
    at++;
  }
  if (reader->run_of_ends == 0) return;
  refine_run(reader, block, at, whole_band);
  reader->run_of_ends--;
}

pl_read_band *pl_band_reader_for(const pl_scan *scan) {
  if (scan->first == 0) return scan->high == 0 ? read_dc_first : read_dc_more;
  return scan->high == 0 ? read_ac_first : read_ac_more;
}
