/* Codes all coefficients of a file anew, for those whose bits cannot be copied. No pixel changes. */
#ifndef PACELINE_TRANSCODE_H
#define PACELINE_TRANSCODE_H

#include "jpeg.h"
#include "writer.h"

/* Read the coefficients of a file whose first scan's header was read, and write its record into `writer`, to be closed
 * by the caller, in the scratch. `shape` gets the tables' numbers. Return NULL, or a reason as `pl_index_jpeg` does. */
const char *pl_transcode(pl_jpeg *jpeg, pl_scan *scan, pl_record *shape, pl_scratch *scratch, pl_writer *writer);

#endif
