/* The types Pool and Task: a pool of native threads and a batch that it makes, with the memory that both use.
 *
 * A Task holds what its images, their output and their status lie in until it is done; so nothing can be freed, closed
 * or resized below the threads. It has its own copy of everything that was checked.
 */
#include "binding.h"

#include <errno.h>
#include <math.h>
#include <stdbool.h>
#include <stdlib.h>

#include "pool.h"

#define SLICE_NS 50000000 /* of a wait: so often signals are looked at, such as Ctrl-C */

typedef struct {
  PyObject ob_base;
  pl_pool *pool;
} PoolObject;

typedef struct {
  PyObject ob_base;
  PoolObject *pool;
  pl_task *task;
  Py_buffer *held;
  Py_ssize_t num_held;
} TaskObject;

/* ---- a batch's arguments ----------------------------------------------------------------------------------------- */

typedef struct {
  PyObject *shards, *shard_of, *offsets, *lengths, *boxes, *flips, *out, *status;
  pl_crop crop;
} asked;

typedef struct {
  int32_t *shard_of;
  uint64_t *offsets, *lengths;
  double *boxes;
  uint8_t *flips;
  Py_ssize_t n;
} columns;

static void free_columns(columns *given) {
  PyMem_Free(given->shard_of);
  PyMem_Free(given->offsets);
  PyMem_Free(given->lengths);
  PyMem_Free(given->boxes);
  PyMem_Free(given->flips);
}

static bool copy_columns(const asked *what, columns *given) {
  given->shard_of = pl_copied(what->shard_of, "shard_of", 'i', -1, &given->n);
  return given->shard_of != NULL &&
         (given->offsets = pl_copied(what->offsets, "offsets", 'L', given->n, NULL)) != NULL &&
         (given->lengths = pl_copied(what->lengths, "lengths", 'L', given->n, NULL)) != NULL &&
         (given->boxes = pl_copied(what->boxes, "boxes", 'd', 4 * given->n, NULL)) != NULL &&
         (given->flips = pl_copied(what->flips, "flips", 'u', given->n, NULL)) != NULL;
}

static void release_held(TaskObject *task) {
  Py_buffer *held = task->held; /* whoever comes meanwhile, by way of an object's own code, finds nothing left */
  Py_ssize_t num_held = task->num_held;
  task->held = NULL;
  task->num_held = 0;
  for (Py_ssize_t i = 0; i < num_held; i++) PyBuffer_Release(&held[i]);
  PyMem_Free(held);
}

/* Borrow the shards, then the output and the status, for as long as the task runs. */
static bool hold(const asked *what, Py_ssize_t n, TaskObject *task) {
  PyObject *shards = PySequence_Tuple(what->shards);
  if (shards == NULL) return false;
  Py_ssize_t num_shards = PyTuple_Size(shards);
  task->held = PyMem_Calloc((size_t)num_shards + 2, sizeof(Py_buffer));
  bool is_good = task->held != NULL;
  if (!is_good) PyErr_NoMemory();
  for (Py_ssize_t i = 0; is_good && i < num_shards; i++) {
    is_good = pl_borrow(PyTuple_GetItem(shards, i), "a shard", '*', -1, 0, &task->held[i]) == 0;
    task->num_held += is_good;
  }
  Py_DECREF(shards);
  Py_ssize_t image_bytes = (Py_ssize_t)what->crop.channels * what->crop.size * what->crop.size;
  is_good = is_good && pl_borrow(what->out, "out", 'u', n * image_bytes, 1, &task->held[num_shards]) == 0;
  task->num_held += is_good;
  is_good = is_good && pl_borrow(what->status, "status", 'i', n, 1, &task->held[num_shards + 1]) == 0;
  task->num_held += is_good;
  return is_good;
}

/* Return where each image lies, all of it inside its shard; NULL with an exception set where one does not. */
static pl_image *locate(const columns *given, const Py_buffer *shards, Py_ssize_t num_shards) {
  pl_image *images = calloc(given->n > 0 ? (size_t)given->n : 1, sizeof(pl_image));
  if (images == NULL) {
    PyErr_NoMemory();
    return NULL;
  }
  for (Py_ssize_t i = 0; i < given->n; i++) {
    if (given->lengths[i] == 0) continue;
    int32_t shard = given->shard_of[i];
    uint64_t num_bytes = shard >= 0 && shard < num_shards ? (uint64_t)shards[shard].len : 0;
    if (given->lengths[i] > num_bytes || given->offsets[i] > num_bytes - given->lengths[i]) {
      PyErr_Format(PyExc_ValueError, "image %zd is at %llu, %llu bytes, of shard %d, which has %llu", i,
                   (unsigned long long)given->offsets[i], (unsigned long long)given->lengths[i], (int)shard,
                   (unsigned long long)num_bytes);
      free(images);
      return NULL;
    }
    const double *box = &given->boxes[4 * i];
    images[i] = (pl_image){.record = (const uint8_t *)shards[shard].buf + given->offsets[i],
                           .num_bytes = (size_t)given->lengths[i],
                           .box = {.top = box[0], .left = box[1], .height = box[2], .width = box[3]},
                           .flip = given->flips[i] != 0};
  }
  return images;
}

/* ---- Pool -------------------------------------------------------------------------------------------------------- */

/* Return whether this process may use the pool; else set ValueError. */
static bool is_usable(const PoolObject *self) {
  if (pl_pool_is_mine(self->pool)) return true;
  PyErr_SetString(PyExc_ValueError, "the pool is another process's (make one after the fork)");
  return false;
}

static void *alloc(PyTypeObject *type) { return ((allocfunc)PyType_GetSlot(type, Py_tp_alloc))(type, 0); }

static PyObject *pool_new(PyTypeObject *type, PyObject *args, PyObject *named) {
  static char *names[] = {"threads", NULL};
  int num_threads;
  if (!PyArg_ParseTupleAndKeywords(args, named, "i:Pool", names, &num_threads)) return NULL;
  if (num_threads < 1 || num_threads > PL_MAX_THREADS)
    return PyErr_Format(PyExc_ValueError, "threads %d is not in 1 to %d", num_threads, PL_MAX_THREADS);
  PoolObject *self = alloc(type);
  if (self == NULL) return NULL;
  int error;
  self->pool = pl_pool_new(num_threads, &error);
  if (self->pool != NULL) return (PyObject *)self;
  Py_DECREF(self);
  errno = error;
  return PyErr_SetFromErrno(PyExc_OSError);
}

static void pool_dealloc(PyObject *object) {
  PoolObject *self = (PoolObject *)object;
  PyTypeObject *type = Py_TYPE(object);
  /* In a forked child its lock may be held by a thread that is not there, so its memory is left. */
  if (self->pool != NULL && pl_pool_is_mine(self->pool)) {
    Py_BEGIN_ALLOW_THREADS
    if (pl_pool_close(self->pool)) pl_pool_free(self->pool);
    Py_END_ALLOW_THREADS
  }
  ((freefunc)PyType_GetSlot(type, Py_tp_free))(object);
  Py_DECREF(type);
}

/* Queue what was asked for; `task` frees what it has got, whatever becomes of this. */
static bool submit_to(PoolObject *self, const asked *what, TaskObject *task) {
  columns given = {0};
  pl_image *images = NULL;
  Py_ssize_t image_bytes = (Py_ssize_t)what->crop.channels * what->crop.size * what->crop.size;
  if (copy_columns(what, &given)) {
    if (given.n > PY_SSIZE_T_MAX / image_bytes)
      PyErr_SetString(PyExc_ValueError, "shard_of has too many items");
    else if (hold(what, given.n, task))
      images = locate(&given, task->held, task->num_held - 2);
  }
  free_columns(&given);
  if (images == NULL) return false;
  uint8_t *out = task->held[task->num_held - 2].buf;
  int32_t *status = task->held[task->num_held - 1].buf;
  /* With the GIL: the threads hold the pool's lock for less than it takes to get the GIL back from a busy thread. */
  task->task = pl_pool_submit(self->pool, images, (size_t)given.n, what->crop, out, status);
  if (task->task != NULL) return true;
  free(images);
  PyErr_SetString(PyExc_ValueError, "the pool is closed");
  return false;
}

static PyObject *pool_submit(PyObject *object, PyObject *args, PyObject *named) {
  static char *names[] = {"shards", "shard_of", "offsets",  "lengths", "boxes",  "flips", "inside",
                          "size",   "channels", "out",      "status",  "stage",  NULL};
  PoolObject *self = (PoolObject *)object;
  asked what;
  int stage = PL_ALL;
  if (!PyArg_ParseTupleAndKeywords(args, named, "OOOOOOpiiOO|i:submit", names, &what.shards, &what.shard_of,
                                   &what.offsets, &what.lengths, &what.boxes, &what.flips, &what.crop.inside,
                                   &what.crop.size, &what.crop.channels, &what.out, &what.status, &stage))
    return NULL;
  if (!is_usable(self) || pl_check_output(what.crop.size, what.crop.channels, stage)) return NULL;
  what.crop.stage = (pl_stage)stage;
  pl_state *state = PyType_GetModuleState(Py_TYPE(object));
  TaskObject *task = state != NULL ? alloc(state->task_type) : NULL;
  if (task == NULL) return NULL;
  task->pool = (PoolObject *)Py_NewRef(object);
  if (submit_to(self, &what, task)) return (PyObject *)task;
  Py_DECREF(task);
  return NULL;
}

static PyObject *pool_close(PyObject *object, PyObject *unused) {
  (void)unused;
  PoolObject *self = (PoolObject *)object;
  if (!is_usable(self)) return NULL;
  Py_BEGIN_ALLOW_THREADS
  (void)pl_pool_close(self->pool);
  Py_END_ALLOW_THREADS
  Py_RETURN_NONE;
}

static PyObject *pool_scratch_bytes(PyObject *object, void *unused) {
  (void)unused;
  PoolObject *self = (PoolObject *)object;
  return is_usable(self) ? PyLong_FromSize_t(pl_pool_scratch_bytes(self->pool)) : NULL;
}

/* ---- Task -------------------------------------------------------------------------------------------------------- */

static void task_dealloc(PyObject *object) {
  TaskObject *self = (TaskObject *)object;
  PyTypeObject *type = Py_TYPE(object);
  bool is_freed = true;
  if (self->task != NULL && pl_pool_is_mine(self->pool->pool)) {
    Py_BEGIN_ALLOW_THREADS
    is_freed = pl_task_free(self->task);
    Py_END_ALLOW_THREADS
  } else if (self->task != NULL) {
    pl_task_forget(self->task);
  }
  if (is_freed) { /* else a thread that hangs may still write: what it uses is never given back */
    release_held(self);
    Py_XDECREF((PyObject *)self->pool);
  }
  ((freefunc)PyType_GetSlot(type, Py_tp_free))(object);
  Py_DECREF(type);
}

/* Return 1 where the task is done, 0 where not, -1 with an exception set where it never will be. */
static int look(TaskObject *self, int64_t timeout_ns) {
  pl_task_state state = pl_task_wait(self->task, 0);
  if (state == PL_RUNNING && timeout_ns > 0) {
    Py_BEGIN_ALLOW_THREADS
    state = pl_task_wait(self->task, timeout_ns);
    Py_END_ALLOW_THREADS
  }
  if (state == PL_RUNNING) return 0;
  release_held(self);
  if (state == PL_DONE) return 1;
  PyErr_SetString(PyExc_ValueError, "the pool was closed before the task was done");
  return -1;
}

static PyObject *task_wait(PyObject *object, PyObject *timeout) {
  TaskObject *self = (TaskObject *)object;
  double timeout_s = PyFloat_AsDouble(timeout);
  if (timeout_s == -1.0 && PyErr_Occurred()) return NULL;
  if (!is_usable(self->pool)) return NULL;
  if (isnan(timeout_s) || timeout_s < 0) return PyErr_Format(PyExc_ValueError, "timeout_s %R is no time", timeout);
  double left_ns = timeout_s < 9e9 ? timeout_s * 1e9 : 9e18; /* 285 years stand for ever */
  for (;;) {
    int64_t slice_ns = left_ns < SLICE_NS ? (int64_t)left_ns : SLICE_NS;
    int is_done = look(self, slice_ns);
    if (is_done < 0) return NULL;
    left_ns -= (double)slice_ns;
    if (is_done || left_ns < 1) return PyBool_FromLong(is_done); /* what is left of a nanosecond is no time */
    if (PyErr_CheckSignals()) return NULL;
  }
}

static PyObject *task_done(PyObject *object, void *unused) {
  (void)unused;
  TaskObject *self = (TaskObject *)object;
  int is_done = is_usable(self->pool) ? look(self, 0) : -1;
  return is_done < 0 ? NULL : PyBool_FromLong(is_done);
}

static PyObject *task_seconds(PyObject *object, void *unused) {
  (void)unused;
  TaskObject *self = (TaskObject *)object;
  return is_usable(self->pool) ? PyFloat_FromDouble(1e-9 * (double)pl_task_busy_ns(self->task)) : NULL;
}

/* ---- the types ----------------------------------------------------------------------------------------------- */

static PyMethodDef pool_methods[] = {
    {"submit", (PyCFunction)(void (*)(void))pool_submit, METH_VARARGS | METH_KEYWORDS, "Queue a batch of crops."},
    {"close", pool_close, METH_NOARGS, "Leave out what has not begun, and join the threads."},
    {NULL, NULL, 0, NULL},
};
static PyGetSetDef pool_values[] = {
    {"scratch_bytes", pool_scratch_bytes, NULL, "Bytes that the threads keep from image to image.", NULL},
    {NULL, NULL, NULL, NULL, NULL},
};
static PyType_Slot pool_slots[] = {
    {Py_tp_doc, "Native threads that decode batches, images in order of submission."},
    {Py_tp_new, (void *)pool_new},
    {Py_tp_dealloc, (void *)pool_dealloc},
    {Py_tp_methods, pool_methods},
    {Py_tp_getset, pool_values},
    {0, NULL},
};
static PyType_Spec pool_spec = {.name = "paceline.data._native.Pool",
                                .basicsize = sizeof(PoolObject),
                                .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_IMMUTABLETYPE,
                                .slots = pool_slots};

static PyMethodDef task_methods[] = {
    {"wait", task_wait, METH_O, "Wait at most so many seconds; return whether the task is done."},
    {NULL, NULL, 0, NULL},
};
static PyGetSetDef task_values[] = {
    {"seconds", task_seconds, NULL, "Seconds that the threads have spent on it, all together.", NULL},
    {"done", task_done, NULL, "Whether all its images are done.", NULL},
    {NULL, NULL, NULL, NULL, NULL},
};
static PyType_Slot task_slots[] = {
    {Py_tp_doc, "A batch that a pool makes."},
    {Py_tp_dealloc, (void *)task_dealloc},
    {Py_tp_methods, task_methods},
    {Py_tp_getset, task_values},
    {0, NULL},
};
static PyType_Spec task_spec = {
    .name = "paceline.data._native.Task",
    .basicsize = sizeof(TaskObject),
    .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_IMMUTABLETYPE | Py_TPFLAGS_DISALLOW_INSTANTIATION,
    .slots = task_slots};

int pl_add_pool_types(PyObject *module, pl_state *state) {
  state->pool_type = (PyTypeObject *)PyType_FromModuleAndSpec(module, &pool_spec, NULL);
  state->task_type = (PyTypeObject *)PyType_FromModuleAndSpec(module, &task_spec, NULL);
  if (state->pool_type == NULL || state->task_type == NULL) return -1;
  return PyModule_AddType(module, state->pool_type) || PyModule_AddType(module, state->task_type) ? -1 : 0;
}
