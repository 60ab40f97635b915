/* All coefficients of an image at once, as files of several scans need: progressive ones, whose scans each add some
 * coefficients or some bits of them, and sequential ones whose components come one after the other. */
#ifndef PACELINE_COEFFICIENTS_H
#define PACELINE_COEFFICIENTS_H

#include "huffman.h"
#include "jpeg.h"
#include "record.h"

typedef struct {
  int across, down;   /* blocks, padded to whole MCUs */
  int16_t *blocks;    /* natural order, not dequantized */
  int8_t low[64];     /* by place in zigzag order: bits still unknown; -1: all */
  uint16_t quant[64]; /* natural order: as it was when the component's first scan came */
} pl_component_blocks;

typedef struct {
  pl_component_blocks components[3];
} pl_coefficients;

/* Read the scan whose header was read, and all that follow, to the end of the image. Return NULL, or a reason as
 * `pl_index_jpeg` does. The blocks lie in `scratch->coefficients`. */
const char *pl_coefficients_read(pl_jpeg *jpeg, pl_scan *scan, const pl_record *shape, pl_scratch *scratch,
                                 pl_coefficients *coefficients);

/* ---- blocks of one scan (progressive.c) -------------------------------------------------------------------------- */

typedef struct {
  pl_bits bits;
  const pl_scan *scan;
  const pl_codes *dc, *ac; /* of the component at hand */
  int32_t predictors[3];
  uint32_t run_of_ends; /* blocks, this one included, that have nothing more in the band */
  bool wrong;
} pl_band_reader;

/* Read what the scan says of one block of its component number `component`. */
typedef void pl_read_band(pl_band_reader *reader, int component, int16_t *block);

/* Return what reads blocks of such a scan of a progressive file. */
pl_read_band *pl_band_reader_for(const pl_scan *scan);

/* Reads a block of a sequential file. */
pl_read_band pl_read_sequential;

#endif
