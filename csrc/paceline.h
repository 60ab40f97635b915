/* What the parts of the native core share: the words, the limits, and who hands what to whom.
 *
 * A record is an indexed JPEG (docs/reference/indexed-jpeg.md): the entropy-coded bits of a baseline JPEG without
 * stuffing, and seek points into them. Nothing in it is trusted: every number is checked before it is used, and every
 * read is bounded. No function here touches Python, allocates per pixel, or keeps state outside a `pl_scratch`.
 */
#ifndef PACELINE_H
#define PACELINE_H

#include <stddef.h>
#include <stdint.h>

#define PL_MAX_PIXELS 128000000 /* as `data.decode.MAX_PIXELS` */
#define PL_MAX_OUTPUT 4096      /* height and width of what is handed out */
#define PL_POINT_BYTES 10       /* of a seek point: u32 bit, i16 predictors[3] */
#define PL_TAIL_BYTES 8         /* zeros behind the bits of a record */

typedef enum {
  PL_OK = 0,
  PL_NOT_A_RECORD = 1, /* no magic, a version of the future, or sizes that contradict one another */
  PL_BAD_TABLES = 2,   /* Huffman or quantization tables that no JPEG can have */
  PL_BAD_POINTS = 3,   /* a seek point outside the bits */
  PL_BAD_BITS = 4,     /* bits that are no code, or that end too early */
  PL_BAD_REGION = 5,   /* a box outside the image, or an output that is too large: the caller's mistake */
  PL_TOO_LARGE = 6,    /* more than PL_MAX_PIXELS */
  PL_NO_MEMORY = 7,
  PL_UNREADABLE = 8,   /* a file that is not there, is none, is empty or shorter now, or whose disk fails */
  PL_RESIZED = 9,      /* a JPEG file of another size than the caller believed (files.c) */
  PL_NOT_INDEXABLE = 10 /* a file that is no JPEG, or one that `pl_index_jpeg` refuses (files.c) */
} pl_status;

/* Return what a person should read of a status, e.g. "its Huffman tables are damaged". */
const char *pl_reason(pl_status status);

/* ---- memory that a thread keeps from image to image (scratch.c) ---------------------------------------------- */

typedef struct {
  void *data; /* aligned to 64 bytes */
  size_t size;
} pl_buffer;

struct pl_tables; /* Huffman look-up tables, built once per distinct set (huffman.h) */

typedef struct {
  pl_buffer coefficients, planes, rows, taps, columns;
  pl_buffer file, plain, record; /* a JPEG file, the bytes of one of its scans, and the record that is made of it */
  struct pl_tables *tables;
} pl_scratch;

pl_scratch *pl_scratch_new(void); /* NULL: no memory */
void pl_scratch_free(pl_scratch *scratch);
size_t pl_scratch_bytes(const pl_scratch *scratch);

/* Make `buffer` hold at least `size` bytes, contents undefined; return its memory, or NULL where there is none. */
void *pl_reserve(pl_buffer *buffer, size_t size);

/* ---- records (record.c, jpeg.c, index.c) ---------------------------------------------------------------------- */

typedef struct {
  int width, height;     /* as stored, before `orientation` turns it upright */
  int components;        /* 1 (gray) or 3 (YCbCr) */
  int orientation;       /* EXIF's: 1..8 */
  int every;             /* MCUs between seek points in a row of MCUs */
  int hs[3], vs[3];      /* sampling factors, 1 or 2 (4 where noted); hmax, vmax are the largest */
  int hmax, vmax;
  int mcus_x, mcus_y;    /* MCUs in a row, rows of MCUs */
  int points_x;          /* seek points in a row of MCUs */
  int dc_table[3], ac_table[3];
  const uint8_t *quant;  /* components x 64 x u16, natural order */
  const uint8_t *huffman;
  size_t huffman_bytes;
  uint8_t huffman_mask;  /* which of dc0, ac0, dc1, ac1 follow */
  const uint8_t *points; /* mcus_y x points_x x PL_POINT_BYTES */
  const uint8_t *bits;   /* scan_bytes, then at least PL_TAIL_BYTES that may be read */
  size_t scan_bytes;
} pl_record;

/* Look at `size` bytes as a record; `record` points into them. Checks sizes, tables' extents and limits, not bits. */
pl_status pl_record_open(const uint8_t *data, size_t size, pl_record *record);

#define PL_ENTRY_BYTES 32 /* of an index entry (entry.h), before the head of the record */

/* A JPEG file made into a record, which stands in the scratch until its next use. */
typedef struct {
  uint8_t *record; /* PL_ENTRY_BYTES before it may be written too */
  size_t size, head_bytes; /* `head_bytes`: all that lies before the bits */
  size_t scan_at, scan_bytes; /* the file's entropy-coded data, if its bits are the record's; else 0 bytes */
} pl_indexed;

/* Make the record of a whole JPEG file, with a seek point every `every` MCUs. Return NULL, or why that cannot be done
 * without changing a pixel, in words that end "it is ..." well. The file may lie in `scratch->file`. */
const char *pl_index_jpeg(const uint8_t *file, size_t size, int every, pl_scratch *scratch, pl_indexed *indexed);

/* ---- from a record to samples (entropy.c, idct.c, planes.c, full.c) -------------------------------------------- */

/* One component's samples of a region. Rows are `stride` bytes apart; 64 bytes beyond each row's end and 8 rows
 * beyond the last may be read (their values are undefined). Sample (0, 0) is sample (x0, y0) of the component;
 * `width`, `height` are of samples that exist in the image, not of the padding to whole blocks. All four count reduced
 * samples: sample i of a row is the mean of `reduction` samples of the component, from reduction * i on. */
typedef struct {
  const uint8_t *data;
  ptrdiff_t stride;
  int x0, y0, width, height;
} pl_plane;

/* All but the first are to measure: parts, and what a crop is without reduction. */
typedef enum { PL_ALL = 0, PL_ENTROPY_ONLY = 1, PL_NO_RESIZE = 2, PL_NO_REDUCTION = 3 } pl_stage;

/* Pixels [top, bottom) x [left, right) of the stored image, and what each component is reduced by: 1, 2, 4 or 8. */
typedef struct {
  int top, left, bottom, right;
  int reductions[3];
} pl_region;

/* Decode the MCUs that hold a region into planes in `scratch`, which stand until its next use. Samples are those of
 * libjpeg's islow IDCT, whole or scaled, bit for bit. */
pl_status pl_decode_planes(const pl_record *record, pl_region region, pl_stage stage, pl_scratch *scratch,
                           pl_plane planes[3]);

/* Decode the whole image, upright, to `out` [height, width, channels], bit for bit as libjpeg-turbo's islow with fancy
 * upsampling does. `channels` is 3 (RGB; gray is repeated) or 1 (gray as Pillow converts to L). */
pl_status pl_decode_full(const pl_record *record, int channels, pl_scratch *scratch, uint8_t *out);

/* ---- from samples to a training image (crop.c, resize.c, colour.c) ---------------------------------------------- */

/* A box of the upright image in pixels; it may have fractions. */
typedef struct {
  double top, left, height, width;
} pl_box;

/* Decode `box` and resize it to `size` x `size` with a triangle filter, antialiased, into `out` [channels, size,
 * size]; mirrored left to right if `flip`. With `inside` the filter sees pixels of the box alone, as after cropping;
 * else it reaches beyond the box into the image, as when cropping comes after resizing. Where the box is much larger
 * than the output, components are decoded at a half, a quarter or an eighth of their size (crop.c). */
pl_status pl_decode_crop(const pl_record *record, pl_box box, int inside, int flip, int size, int channels,
                         pl_stage stage, pl_scratch *scratch, uint8_t *out);

/* ---- batches that are pixels already (move.c) -------------------------------------------------------------------- */

/* out[n] = images[indices[n]] padded by `padding` (zeros, or reflected), cut at (tops[n], lefts[n]) to its own size,
 * and mirrored where flips[n]. `images` is [count, channels, height, width]; the caller has checked all indices; tops
 * and lefts are in [0, 2 * padding]. */
void pl_move(const uint8_t *images, const int64_t *indices, const int32_t *tops, const int32_t *lefts,
             const uint8_t *flips, size_t n, int channels, int height, int width, int padding, int reflect,
             uint8_t *out);

/* ---- which instructions (cpu.c) ---------------------------------------------------------------------------------- */

typedef enum { PL_SCALAR = 0, PL_AVX2 = 1 } pl_isa; /* all give the same bits */

pl_isa pl_isa_best(void);    /* what this processor has */
pl_isa pl_isa_now(void);     /* what is used: the best, unless chosen otherwise */
void pl_isa_choose(pl_isa isa); /* for tests and for measuring; the caller has asked pl_isa_best */

#endif
