/* Memory for intermediates: one block per thread and slot, kept from call to call because fresh pages are slow, given
 * back when the thread ends. Contents are undefined at each `cs_scratch`, and valid until the same thread asks for the
 * same slot again. */
#ifndef CS_SCRATCH_H
#define CS_SCRATCH_H

#include <stddef.h>

enum {
    CS_SHARED = 0,  /* held by the calling thread, read or written by all threads of the call */
    CS_PRIVATE = 1, /* a worker's own */
    CS_SLOTS = 2
};

/* At least `bytes`, 64-byte aligned; NULL if there is no memory. */
void *cs_scratch(int slot, size_t bytes);
/* Memory that `cs_scratch` takes for this size: whole pages, huge pages for large blocks. */
size_t cs_scratch_rounded(size_t bytes);
/* After the call's last use: blocks beyond CS_KEPT_BYTES go back to the system. */
void cs_scratch_done(int slot);

#define CS_KEPT_BYTES ((size_t)64 << 20)

#endif
