#ifndef TANDEM_FABRIC_H
#define TANDEM_FABRIC_H

#include <stddef.h>
#include <stdint.h>

// Functions that return const char * return null, or an error in a thread-local buffer. td_post and
// td_poll store errors in a buffer of the endpoint.

typedef struct td_device td_device; // a fabric and its domain
typedef struct td_end td_end;       // an endpoint with its queue and its one peer
typedef struct td_mr td_mr;

typedef struct {
	char provider[64], fabric[64], domain[64];
	uint32_t library; // version: major << 16 | minor
	int virtual_addresses, provider_keys, local_keys, hmem;
	size_t most; // bytes of a write
} td_info;

enum { TD_WRITTEN = 1, TD_LANDED = 2, TD_FAILED = 3 };

typedef struct {
	uint64_t token; // of a write that completed here, or failed
	uint32_t data;  // TD_LANDED: carried by the peer's write
	int32_t kind;
	int32_t err;
	int32_t own; // TD_FAILED: a local write
} td_event;

typedef struct {
	uint64_t from; // local address
	uint64_t to;   // remote address, as in the peer's registration
	uint64_t key;
	uint64_t len;
	td_mr *mr; // registration of from; null if the provider does not need it
} td_write;

const char *td_load(const char *path);
const char *td_open(const char *provider, const char *address, int hmem, td_device **, td_info *);
const char *td_close(td_device *);
const char *td_register(td_device *, uint64_t at, uint64_t len, uint64_t key, int remote, int device, int dmabuf, uint64_t offset, td_mr **);
uint64_t td_key(td_mr *);
const char *td_unregister(td_mr *);
const char *td_endpoint(td_device *, int depth, td_end **);
const char *td_name(td_end *, void *to, size_t *n);
const char *td_peer(td_end *, const void *name);
int td_post(td_end *, const td_write *, int n, uint64_t token, uint32_t data, const char **why);
int td_poll(td_end *, td_event *, int n, int spins, const char **why);
const char *td_end_close(td_end *);

#endif
