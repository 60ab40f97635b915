/* Writes coefficients as one sequential scan with the Huffman tables that T.81 gives as typical. */
#include "transcode.h"

#include "block.h"
#include "coefficients.h"

#define LARGEST_COEFFICIENT 8191 /* dequantized, as in index.c */
#define LARGEST_AC 1023          /* of PL_MAX_AC_SIZE bits */

/* T.81, tables K.3 to K.6: 16 counts, then values. They have a code for every symbol of 8-bit samples, and a decoder
 * that meets the same tables in most images keeps what it built of them. */
static const uint8_t dc_luma[] = {
    0, 1, 5, 1, 1, 1, 1, 1, 1, 0, 0, 0, 0, 0, 0, 0,
    0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11
};
static const uint8_t dc_chroma[] = {
    0, 3, 1, 1, 1, 1, 1, 1, 1, 1, 1, 0, 0, 0, 0, 0,
    0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11
};
static const uint8_t ac_luma[] = {
    0, 2, 1, 3, 3, 2, 4, 3, 5, 5, 4, 4, 0, 0, 1, 125,
    0x01, 0x02, 0x03, 0x00, 0x04, 0x11, 0x05, 0x12, 0x21, 0x31, 0x41, 0x06, 0x13, 0x51, 0x61, 0x07, 0x22, 0x71,
    0x14, 0x32, 0x81, 0x91, 0xa1, 0x08, 0x23, 0x42, 0xb1, 0xc1, 0x15, 0x52, 0xd1, 0xf0, 0x24, 0x33, 0x62, 0x72,
    0x82, 0x09, 0x0a, 0x16, 0x17, 0x18, 0x19, 0x1a, 0x25, 0x26, 0x27, 0x28, 0x29, 0x2a, 0x34, 0x35, 0x36, 0x37,
    0x38, 0x39, 0x3a, 0x43, 0x44, 0x45, 0x46, 0x47, 0x48, 0x49, 0x4a, 0x53, 0x54, 0x55, 0x56, 0x57, 0x58, 0x59,
    0x5a, 0x63, 0x64, 0x65, 0x66, 0x67, 0x68, 0x69, 0x6a, 0x73, 0x74, 0x75, 0x76, 0x77, 0x78, 0x79, 0x7a, 0x83,
    0x84, 0x85, 0x86, 0x87, 0x88, 0x89, 0x8a, 0x92, 0x93, 0x94, 0x95, 0x96, 0x97, 0x98, 0x99, 0x9a, 0xa2, 0xa3,
    0xa4, 0xa5, 0xa6, 0xa7, 0xa8, 0xa9, 0xaa, 0xb2, 0xb3, 0xb4, 0xb5, 0xb6, 0xb7, 0xb8, 0xb9, 0xba, 0xc2, 0xc3,
    0xc4, 0xc5, 0xc6, 0xc7, 0xc8, 0xc9, 0xca, 0xd2, 0xd3, 0xd4, 0xd5, 0xd6, 0xd7, 0xd8, 0xd9, 0xda, 0xe1, 0xe2,
    0xe3, 0xe4, 0xe5, 0xe6, 0xe7, 0xe8, 0xe9, 0xea, 0xf1, 0xf2, 0xf3, 0xf4, 0xf5, 0xf6, 0xf7, 0xf8, 0xf9, 0xfa
};
static const uint8_t ac_chroma[] = {
    0, 2, 1, 2, 4, 4, 3, 4, 7, 5, 4, 4, 0, 1, 2, 119,
    0x00, 0x01, 0x02, 0x03, 0x11, 0x04, 0x05, 0x21, 0x31, 0x06, 0x12, 0x41, 0x51, 0x07, 0x61, 0x71, 0x13, 0x22,
    0x32, 0x81, 0x08, 0x14, 0x42, 0x91, 0xa1, 0xb1, 0xc1, 0x09, 0x23, 0x33, 0x52, 0xf0, 0x15, 0x62, 0x72, 0xd1,
    0x0a, 0x16, 0x24, 0x34, 0xe1, 0x25, 0xf1, 0x17, 0x18, 0x19, 0x1a, 0x26, 0x27, 0x28, 0x29, 0x2a, 0x35, 0x36,
    0x37, 0x38, 0x39, 0x3a, 0x43, 0x44, 0x45, 0x46, 0x47, 0x48, 0x49, 0x4a, 0x53, 0x54, 0x55, 0x56, 0x57, 0x58,
    0x59, 0x5a, 0x63, 0x64, 0x65, 0x66, 0x67, 0x68, 0x69, 0x6a, 0x73, 0x74, 0x75, 0x76, 0x77, 0x78, 0x79, 0x7a,
    0x82, 0x83, 0x84, 0x85, 0x86, 0x87, 0x88, 0x89, 0x8a, 0x92, 0x93, 0x94, 0x95, 0x96, 0x97, 0x98, 0x99, 0x9a,
    0xa2, 0xa3, 0xa4, 0xa5, 0xa6, 0xa7, 0xa8, 0xa9, 0xaa, 0xb2, 0xb3, 0xb4, 0xb5, 0xb6, 0xb7, 0xb8, 0xb9, 0xba,
    0xc2, 0xc3, 0xc4, 0xc5, 0xc6, 0xc7, 0xc8, 0xc9, 0xca, 0xd2, 0xd3, 0xd4, 0xd5, 0xd6, 0xd7, 0xd8, 0xd9, 0xda,
    0xe2, 0xe3, 0xe4, 0xe5, 0xe6, 0xe7, 0xe8, 0xe9, 0xea, 0xf2, 0xf3, 0xf4, 0xf5, 0xf6, 0xf7, 0xf8, 0xf9, 0xfa
};

typedef struct {
  uint16_t code[256];
  uint8_t length[256]; /* 0: no code */
} encoder;

typedef struct {
  const pl_record *shape;
  const pl_coefficients *coefficients;
  encoder dc[2], ac[2];
  int32_t predictors[3];
  pl_writer *writer;
  pl_buffer *record;
} work;

static void make_encoder(const uint8_t *table, encoder *made) {
  for (int symbol = 0; symbol < 256; symbol++) {
    uint32_t code = 0;
    made->length[symbol] = (uint8_t)pl_code_of(table, (uint8_t)symbol, &code);
    made->code[symbol] = (uint16_t)code;
  }
}

/* ---- what can be written ----------------------------------------------------------------------------------------- */

static bool is_in_range(const int16_t *block, const uint16_t *quant) {
  bool is_too_large = false;
  for (int i = 0; i < 64; i++) {
    int32_t value = block[i], dequantised = value * (int32_t)quant[i];
    is_too_large |= dequantised > LARGEST_COEFFICIENT || dequantised < -LARGEST_COEFFICIENT;
    is_too_large |= i > 0 && (value > LARGEST_AC || value < -LARGEST_AC);
  }
  return !is_too_large;
}

/* Set `*max_bytes` to more than all blocks take. */
static const char *measure(const work *w, size_t *max_bytes) {
  uint64_t bits = 0;
  for (int c = 0; c < w->shape->components; c++) {
    const pl_component_blocks *component = &w->coefficients->components[c];
    size_t num_blocks = (size_t)component->across * (size_t)component->down;
    for (size_t i = 0; i < num_blocks; i++) {
      const int16_t *block = component->blocks + 64 * i;
      if (!is_in_range(block, component->quant)) return "damaged (coefficients no image has)";
      uint64_t symbols = 4; // the DC's, three runs of 16 zeros at most and an end; a run and the end have no value
      for (int at = 1; at < 64; at++) symbols += block[at] != 0;
      bits += symbols * (PL_MAX_CODE_BITS + PL_MAX_DC_SIZE) + PL_MAX_CODE_BITS;
    }
  }
  *max_bytes = (size_t)(bits / 8 + 8);
  return bits / 8 + 8 > UINT32_MAX / 8 ? "too large" : NULL;
}

/* ---- writing ----------------------------------------------------------------------------------------------------- */

/* Write a symbol that consists of a run of zeros and a value's size, and the value. */
static void put(work *w, const encoder *with, uint32_t run, int32_t value) {
  uint32_t size = pl_bits_of(value), symbol = run << 4 | size;
  pl_writer_put(w->writer, with->code[symbol], with->length[symbol]);
  pl_writer_put(w->writer, (uint32_t)(value < 0 ? value - 1 : value), size);
}

/* Return false where the DC differs by more than there is a code for. */
static bool write_block(work *w, int component, const int16_t *block) {
  const encoder *dc = &w->dc[w->shape->dc_table[component]], *ac = &w->ac[w->shape->ac_table[component]];
  int32_t difference = block[0] - w->predictors[component];
  if (difference >= 1 << PL_MAX_DC_SIZE || difference <= -(1 << PL_MAX_DC_SIZE)) return false;
  put(w, dc, 0, difference);
  w->predictors[component] = block[0];
  uint32_t run = 0;
  for (int at = 1; at < 64; at++) {
    int16_t value = block[pl_natural_order[at]];
    if (value == 0) {
      run++;
      continue;
    }
    for (; run > 15; run -= 16) put(w, ac, 15, 0);
    put(w, ac, run, value);
    run = 0;
  }
  if (run > 0) put(w, ac, 0, 0);
  return true;
}

static bool write_mcu(work *w, int x, int y) {
  bool is_written = true;
  for (int c = 0; c < w->shape->components; c++) {
    const pl_component_blocks *component = &w->coefficients->components[c];
    int h = w->shape->hs[c], v = w->shape->vs[c];
    for (int i = 0; i < h * v; i++) {
      size_t at = (size_t)(y * v + i / h) * (size_t)component->across + (size_t)(x * h + i % h);
      is_written = is_written && write_block(w, c, component->blocks + 64 * at);
    }
  }
  return is_written;
}

static const char *write_record(work *w) {
  const uint8_t *const tables[4] = {dc_luma, ac_luma, w->shape->components == 3 ? dc_chroma : NULL,
                                    w->shape->components == 3 ? ac_chroma : NULL};
  const uint16_t *quant[3] = {NULL, NULL, NULL};
  size_t max_bytes = 0;
  const char *reason = measure(w, &max_bytes);
  if (reason != NULL) return reason;
  for (int c = 0; c < w->shape->components; c++) quant[c] = w->coefficients->components[c].quant;
  for (int i = 0; i < 4; i++) {
    if (tables[i] != NULL) make_encoder(tables[i], i % 2 == 0 ? &w->dc[i / 2] : &w->ac[i / 2]);
  }
  if (!pl_writer_open(w->writer, w->record, w->shape, quant, tables, max_bytes)) return "too large for this memory";
  for (int y = 0; y < w->shape->mcus_y; y++) {
    for (int x = 0; x < w->shape->mcus_x; x++) {
      if (x % w->shape->every == 0) pl_writer_point(w->writer, pl_writer_position(w->writer), w->predictors);
      if (!write_mcu(w, x, y)) return "damaged (coefficients no image has)";
    }
  }
  return NULL;
}

const char *pl_transcode(pl_jpeg *jpeg, pl_scan *scan, pl_record *shape, pl_scratch *scratch, pl_writer *writer) {
  pl_coefficients coefficients;
  const char *reason = pl_coefficients_read(jpeg, scan, shape, scratch, &coefficients);
  if (reason != NULL) return reason;
  for (int c = 0; c < shape->components; c++) shape->dc_table[c] = shape->ac_table[c] = c > 0;
  work w = {.shape = shape, .coefficients = &coefficients, .writer = writer, .record = &scratch->record};
  return write_record(&w);
}
