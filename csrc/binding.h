/* What the files of the Python binding share: the module's state, its types, and how arguments are looked at.
 *
 * Bound to the stable ABI of Python 3.11, so that one file serves every later version.
 */
#ifndef PACELINE_BINDING_H
#define PACELINE_BINDING_H

#define Py_LIMITED_API 0x030B0000
#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include "paceline.h"

/* Raised whenever a function comes, goes or changes its meaning: `paceline.data.native` wants this very number. */
#define PL_VERSION 3

#define PL_KEPT_SCRATCHES 4 /* between calls of functions that decode in the caller's thread */

typedef struct {
  PyTypeObject *pool_type, *task_type, *mapped_type;
  pl_scratch *kept[PL_KEPT_SCRATCHES]; /* idle ones, first `num_kept`; under the GIL */
  int num_kept;
} pl_state;

/* Add Pool and Task (module_pool.c). Return -1 with an exception set. */
int pl_add_pool_types(PyObject *module, pl_state *state);

/* Add Mapped (module_mapped.c). Return -1 with an exception set. */
int pl_add_mapped_type(PyObject *module, pl_state *state);

PyObject *pl_python_cut_file(PyObject *module, PyObject *unused); /* module_mapped.c */
PyObject *pl_python_move(PyObject *module, PyObject *args, PyObject *named); /* module_move.c */

/* ---- arguments.c ------------------------------------------------------------------------------------------------ */

/* Borrow the memory of `object`: contiguous, of items of `kind`, `num_items` of them (or any number where that is -1).
 * Kinds: 'u' uint8 or bool, 'i' int32, 'l' int64, 'L' uint64, 'd' float64, '*' bytes of whatever is there. Return -1
 * with TypeError or ValueError set, in words that begin with `name`, and `view` needing no release. */
int pl_borrow(PyObject *object, const char *name, char kind, Py_ssize_t num_items, int is_written, Py_buffer *view);

/* Return a copy of such memory (free it with PyMem_Free), and in `*num_items` how many there are, where not NULL. The
 * caller's may change while others run Python; what has been checked must not. */
void *pl_copied(PyObject *object, const char *name, char kind, Py_ssize_t wanted, Py_ssize_t *num_items);

/* Check what a crop is made to. Return -1 with ValueError set. */
int pl_check_output(int size, int channels, int stage);

#endif
