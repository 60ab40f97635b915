/* Which instructions are used: what the processor has, unless a test or a measurement chose otherwise. */
#include <stdatomic.h>

#include "paceline.h"

/* The one word of state of the native core. Threads may read it while another chooses. */
static atomic_int chosen = -1; /* -1: nobody has, take the best */

pl_isa pl_isa_best(void) {
#if defined(__x86_64__)
  return __builtin_cpu_supports("avx2") ? PL_AVX2 : PL_SCALAR;
#else
  return PL_SCALAR;
#endif
}

pl_isa pl_isa_now(void) {
  int isa = atomic_load_explicit(&chosen, memory_order_relaxed);
  return isa < 0 ? pl_isa_best() : (pl_isa)isa;
}

void pl_isa_choose(pl_isa isa) { atomic_store_explicit(&chosen, (int)isa, memory_order_relaxed); }
