/* Turns a JPEG file into a record: the same coefficients, with a seek point every few MCUs.
 *
 * The bits of a sequential file are copied. Only where it has restart markers, which set the DC predictors to zero,
 * the DC differences behind them are coded anew, with the file's own tables. Where those have no codes for them, and of
 * files of several scans, all coefficients are coded anew (transcode.c).
 */
#include <string.h>

#include "block.h"
#include "jpeg.h"
#include "paceline.h"
#include "transcode.h"
#include "writer.h"

#define LARGEST_COEFFICIENT 8191 /* dequantized: eight times what 8-bit samples need, and far from any overflow */
#define RECODED_BYTES 16         /* more at most that an interval's recoded differences take: 3 of 27 bits */

static const char NO_MEMORY[] = "too large for this memory", NO_CODE[] = "divided by restart markers";

/* How blocks of a component are passed over: as long as steps say nothing `suspicious`, and the DC, of either sign, is
 * no larger than `largest_dc`, their coefficients are in range. */
typedef struct {
  const uint16_t *steps;
  uint32_t suspicious;
  int32_t largest_dc;
} passage;

/* An image that is being indexed. */
typedef struct {
  pl_jpeg jpeg;
  pl_scan scan;
  pl_record shape;
  const uint16_t *quant[3];
  const uint8_t *tables[4]; /* dc0, ac0, dc1, ac1: what the record's numbers of tables mean */
  pl_mcu mcu;
  passage passages[3];
  int32_t dc[3]; /* predictors as a reader of the record has them, which knows no restarts */
  pl_scratch *scratch;
  pl_writer writer;
  size_t scan_at, scan_bytes; /* as in pl_indexed */
} work;

/* ---- what the headers say ---------------------------------------------------------------------------------------- */

/* Return the record's number, 0 or 1, of a table; -1 where it would be a third. */
static int number_of(const uint8_t *tables[4], int kind, const uint8_t *table) {
  for (int i = 0; i < 2; i++) {
    const uint8_t **slot = &tables[2 * i + kind];
    if (*slot == NULL) *slot = table;
    if (*slot == table) return i;
  }
  return -1;
}

static const char *choose_tables(work *w) {
  for (int c = 0; c < w->shape.components; c++) {
    int dc = w->scan.dc_table[c], ac = w->scan.ac_table[c], quant = w->jpeg.components[c].quant;
    if (!w->jpeg.has_quant[quant] || !w->jpeg.has_dc[dc] || !w->jpeg.has_ac[ac]) return "damaged (a table is missing)";
    w->quant[c] = w->jpeg.quant[quant];
    w->shape.dc_table[c] = number_of(w->tables, 0, w->jpeg.dc[dc]);
    w->shape.ac_table[c] = number_of(w->tables, 1, w->jpeg.ac[ac]);
    if (w->shape.dc_table[c] < 0 || w->shape.ac_table[c] < 0) return "coded with three sets of Huffman tables";
  }
  return NULL;
}

/* Build the look-up tables, from the tables in the record's header as decoding it will: one set serves both. */
static const char *build_tables(work *w) {
  const pl_code_set *codes = NULL;
  pl_writer_tables(&w->writer, &w->shape);
  pl_status status = pl_tables_for(w->scratch->tables, &w->shape, true, &codes);
  if (status != PL_OK) return status == PL_NO_MEMORY ? NO_MEMORY : "damaged (a Huffman table)";
  pl_mcu_layout(&w->shape, codes, &w->mcu);
  for (int c = 0; c < w->shape.components; c++) {
    uint16_t largest = 0;
    for (int i = 1; i < 64; i++) largest = w->quant[c][i] > largest ? w->quant[c][i] : largest;
    passage *p = &w->passages[c];
    p->steps = codes->steps[w->shape.ac_table[c]];
    p->suspicious = 0; // values of 10 bits are in range
    if (largest * 1023 > LARGEST_COEFFICIENT) p->suspicious |= PL_STEP_9_BITS;
    if (largest * 255 > LARGEST_COEFFICIENT) p->suspicious |= PL_STEP_7_BITS;
    if (largest * 63 > LARGEST_COEFFICIENT) p->suspicious = UINT32_MAX; // any step is
    p->largest_dc = w->quant[c][0] == 0 ? INT32_MAX : LARGEST_COEFFICIENT / w->quant[c][0];
  }
  return NULL;
}

static const char *set_shape(work *w, int every) {
  pl_record *shape = &w->shape;
  shape->width = w->jpeg.width;
  shape->height = w->jpeg.height;
  shape->components = w->jpeg.num_components;
  shape->orientation = w->jpeg.orientation;
  shape->every = every;
  for (int c = 0; c < shape->components; c++) {
    int h = w->jpeg.components[c].h, v = w->jpeg.components[c].v;
    if (h < 1 || h > 4 || v < 1 || v > 4) return "damaged (its frame header)";
    shape->hs[c] = shape->components == 1 ? 1 : h;
    shape->vs[c] = shape->components == 1 ? 1 : v;
  }
  return pl_record_set_geometry(shape) ? NULL : "sampled in an unusual way";
}

/* Return whether the file is one sequential scan of all components, as a record is. */
static bool is_one_scan(const work *w) {
  return !w->jpeg.is_progressive && w->scan.num_components == w->jpeg.num_components && w->scan.first == 0 &&
         w->scan.last == 63 && w->scan.high == 0 && w->scan.low == 0;
}

/* ---- what the bits say ------------------------------------------------------------------------------------------- */

static const char *check_bits(const pl_cursor *cursor) {
  if (pl_bits_overran(&cursor->bits)) return "cut off";
  return pl_cursor_is_sound(cursor) ? NULL : "damaged (bits that are no code)";
}

static bool is_in_range(const int16_t *block, const uint16_t *quant) {
  int32_t largest = 0;
  for (int i = 0; i < 64; i++) {
    int32_t value = block[i] * (int32_t)quant[i];
    value = value < 0 ? -value : value;
    largest = value > largest ? value : largest;
  }
  return largest <= LARGEST_COEFFICIENT;
}

static const char *read_block(const work *w, pl_cursor *cursor, const pl_mcu_block *how) {
  int16_t block[64] = {0};
  pl_read_block(cursor, how, block);
  return is_in_range(block, w->quant[how->component]) ? NULL : "damaged (coefficients no image has)";
}

/* Pass over a block, and read it only where that leaves a doubt. */
PL_INLINE const char *pass_block(const work *w, pl_cursor *cursor, const pl_mcu_block *how, bool guarded) {
  const passage *p = &w->passages[how->component];
  const pl_cursor begin = *cursor;
  pl_bits bits = cursor->bits;
  uint32_t seen = 0, wrong = pl_read_dc(&bits, how->dc, &cursor->dc[how->component], guarded);
  int32_t dc = cursor->dc[how->component];
  bool is_good = pl_step_over_rest(&bits, how->ac, p->steps, &seen, guarded);
  is_good = is_good && (seen & p->suspicious) == 0 && wrong == 0;
  cursor->bits = bits;
  if (__builtin_expect(is_good && dc <= p->largest_dc && -dc <= p->largest_dc, 1)) return NULL;
  *cursor = begin;
  return read_block(w, cursor, how);
}

/* Write the difference between a component's DC and the one before the restart. */
static const char *recode_dc(work *w, int component, int32_t dc) {
  int32_t difference = dc - w->dc[component];
  uint32_t size = pl_bits_of(difference), code = 0;
  int length = 0;
  if (size <= PL_MAX_DC_SIZE) {
    length = pl_code_of(w->tables[2 * w->shape.dc_table[component]], (uint8_t)size, &code);
  }
  if (length == 0) return NO_CODE;
  pl_writer_put(&w->writer, code, (uint32_t)length);
  pl_writer_put(&w->writer, (uint32_t)(difference < 0 ? difference - 1 : difference), size);
  return NULL;
}

/* Read and write the first MCU behind a restart: of each component the first block's DC is coded anew. */
static const char *restart(work *w, pl_cursor *cursor) {
  bool is_first[3] = {true, true, true};
  for (int i = 0; i < w->mcu.num_blocks; i++) {
    const pl_mcu_block *how = &w->mcu.blocks[i];
    uint64_t from = pl_bits_position(&cursor->bits);
    pl_cursor at_dc = *cursor;
    const char *reason = read_block(w, cursor, how);
    if (reason == NULL) reason = check_bits(cursor);
    if (is_first[how->component] && w->dc[how->component] != 0 && reason == NULL) {
      pl_read_dc(&at_dc.bits, how->dc, &at_dc.dc[how->component], true);
      from = pl_bits_position(&at_dc.bits);
      reason = recode_dc(w, how->component, at_dc.dc[how->component]);
    }
    if (reason != NULL) return reason;
    is_first[how->component] = false;
    pl_writer_copy(&w->writer, cursor->bits.bytes, from, pl_bits_position(&cursor->bits));
  }
  return NULL;
}

PL_INLINE const char *pass_mcu(const work *w, pl_cursor *cursor, bool guarded) {
  for (int b = 0; b < w->mcu.num_blocks; b++) {
    const char *reason = pass_block(w, cursor, &w->mcu.blocks[b], guarded);
    if (reason != NULL) return reason;
  }
  return check_bits(cursor);
}

/* Pass over the MCUs from number `first` to before `stop`, and write the seek points among them. A bit's position in
 * the record is that at the cursor plus `shift`. */
static const char *pass_mcus(work *w, pl_cursor *cursor, int64_t first, int64_t stop, uint64_t shift) {
  const int64_t mcus_x = w->shape.mcus_x, every = w->shape.every;
  const size_t most = (size_t)w->mcu.num_blocks * PL_MAX_BLOCK_BYTES;
  while (first < stop) {
    int64_t x = first % mcus_x, next = first + every - x % every, row_end = first + mcus_x - x;
    next = next < row_end ? next : row_end;
    if (x % every == 0) pl_writer_point(&w->writer, pl_bits_position(&cursor->bits) + shift, cursor->dc);
    for (next = next < stop ? next : stop; first < next; first++) {
      // Far from the end of the bits, which is nearly everywhere, refills need no look at it.
      const char *reason = pl_bits_hold(&cursor->bits, most) ? pass_mcu(w, cursor, false) : pass_mcu(w, cursor, true);
      if (reason != NULL) return reason;
    }
  }
  return NULL;
}

static const char *check_end(const pl_cursor *cursor) {
  uint64_t num_bits = (uint64_t)cursor->bits.size * 8, end = pl_bits_position(&cursor->bits);
  return num_bits - end < 8 ? NULL : "damaged (bytes behind its last block)";
}

/* Index a scan without restarts, whose bits become the record's as they are. */
static const char *index_whole(work *w, int64_t num_mcus) {
  uint8_t *bits = pl_writer_next(&w->writer);
  w->scan_at = w->jpeg.at;
  size_t size = pl_jpeg_unstuff(&w->jpeg, bits);
  w->scan_bytes = w->jpeg.at - w->scan_at;
  memset(bits + size, 0, PL_TAIL_BYTES);
  pl_cursor cursor = {.bits = pl_bits_at(bits, size, 0)};
  const char *reason = pass_mcus(w, &cursor, 0, num_mcus, 0);
  if (reason == NULL) reason = check_end(&cursor);
  if (reason == NULL) pl_writer_take(&w->writer, pl_bits_position(&cursor.bits));
  return reason;
}

/* Index the MCUs from `first` to before `stop`, an interval between restart markers. */
static const char *index_interval(work *w, uint8_t *plain, int64_t first, int64_t stop) {
  size_t size = pl_jpeg_unstuff(&w->jpeg, plain);
  memset(plain + size, 0, PL_TAIL_BYTES);
  pl_cursor cursor = {.bits = pl_bits_at(plain, size, 0)};
  if (first % w->shape.mcus_x % w->shape.every == 0) {
    pl_writer_point(&w->writer, pl_writer_position(&w->writer), w->dc);
  }
  const char *reason = restart(w, &cursor);
  uint64_t copied = pl_bits_position(&cursor.bits); // bits that are written; those behind them follow at the end
  if (reason == NULL) reason = pass_mcus(w, &cursor, first + 1, stop, pl_writer_position(&w->writer) - copied);
  if (reason == NULL) reason = check_end(&cursor);
  if (reason != NULL) return reason;
  pl_writer_copy(&w->writer, plain, copied, pl_bits_position(&cursor.bits));
  memcpy(w->dc, cursor.dc, sizeof w->dc);
  return NULL;
}

static const char *index_intervals(work *w, int64_t num_mcus, int64_t interval) {
  uint8_t *plain = pl_reserve(&w->scratch->plain, w->jpeg.size - w->jpeg.at + PL_TAIL_BYTES);
  if (plain == NULL) return NO_MEMORY;
  for (int64_t first = 0, number = 0; first < num_mcus; first += interval, number++) {
    const char *reason = number > 0 ? pl_jpeg_restart(&w->jpeg, number - 1) : NULL;
    if (reason == NULL) {
      reason = index_interval(w, plain, first, num_mcus - first < interval ? num_mcus : first + interval);
    }
    if (reason != NULL) return reason;
  }
  return NULL;
}

static const char *index_scan(work *w) {
  int64_t num_mcus = (int64_t)w->shape.mcus_x * w->shape.mcus_y;
  int64_t interval = w->jpeg.restart_interval == 0 ? num_mcus : w->jpeg.restart_interval;
  size_t num_restarts = (size_t)((num_mcus + interval - 1) / interval) - 1;
  size_t max_scan_bytes = w->jpeg.size - w->jpeg.at + (num_restarts + 1) * RECODED_BYTES;
  if (max_scan_bytes > UINT32_MAX / 8) return "too large";
  if (!pl_writer_open(&w->writer, &w->scratch->record, &w->shape, w->quant, w->tables, max_scan_bytes)) {
    return NO_MEMORY;
  }
  const char *reason = build_tables(w);
  if (reason != NULL) return reason;
  return num_restarts == 0 ? index_whole(w, num_mcus) : index_intervals(w, num_mcus, interval);
}

/* ---- all of it --------------------------------------------------------------------------------------------------- */

/* Index a file of one scan by copying its bits. */
static const char *copy_scan(work *w) {
  const char *reason = choose_tables(w);
  if (reason == NULL) reason = index_scan(w);
  if (reason != NULL) return reason;
  bool is_end = false;
  reason = pl_jpeg_next_scan(&w->jpeg, &w->scan, &is_end);
  return reason == NULL && !is_end ? "damaged (a scan too many)" : reason;
}

static const char *index_file(work *w, const uint8_t *file, size_t size, int every) {
  const char *reason = pl_jpeg_open(file, size, &w->jpeg, &w->scan);
  if (reason == NULL) reason = set_shape(w, every);
  if (reason != NULL) return reason;
  size_t scan_at = w->jpeg.at;
  if (is_one_scan(w)) {
    reason = copy_scan(w);
    if (reason != NO_CODE) return reason;
    w->jpeg.at = scan_at;
  }
  return pl_transcode(&w->jpeg, &w->scan, &w->shape, w->scratch, &w->writer);
}

const char *pl_index_jpeg(const uint8_t *file, size_t size, int every, pl_scratch *scratch, pl_indexed *indexed) {
  if (every < 1 || every > 255) return "indexed with a seek point every 1 to 255 MCUs only";
  work w = {.scratch = scratch};
  const char *reason = index_file(&w, file, size, every);
  if (reason != NULL) return reason;
  *indexed = (pl_indexed){.record = w.writer.data,
                          .size = pl_writer_close(&w.writer),
                          .head_bytes = w.writer.bits_at,
                          .scan_at = w.scan_at,
                          .scan_bytes = w.scan_bytes};
  return NULL;
}
