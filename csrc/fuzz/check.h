/* What both fuzzers do with a record: decode it every way there is, on every set of instructions, and compare.
 *
 * One scratch is used by all inputs in turn, another is new for each: what is left over from one image must not be seen
 * in the next. Outputs lie in memory of just their size, filled with different bytes, so that a sample that nobody
 * writes, or one too many, is found.
 */
#ifndef PACELINE_FUZZ_CHECK_H
#define PACELINE_FUZZ_CHECK_H

#include "../paceline.h"

#define NUM_PARAMETERS 16 /* bytes behind a record that say what is asked of it */

/* Decode a region's planes, a crop and the whole of a record; abort where two ways differ. */
void check_record(const pl_record *record, const uint8_t parameters[NUM_PARAMETERS]);

#endif
