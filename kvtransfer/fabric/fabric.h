#ifndef TANDEM_FABRIC_H
#define TANDEM_FABRIC_H

#include <stddef.h>
#include <stdint.h>

// Every function that returns const char * returns null, or what went wrong, in a buffer of the calling thread's; td_post and td_poll in one of the endpoint's.

typedef struct td_device td_device; // a fabric and its domain
typedef struct td_end td_end;       // an endpoint with its queue and its one peer
typedef struct td_mr td_mr;

typedef struct {
	char provider[64], fabric[64], domain[64];
	uint32_t library; // its version: major << 16 | minor
	int virtual_addresses, provider_keys, local_keys, hmem;
	size_t most; // bytes of a write
} td_info;

enum { TD_WRITTEN = 1, TD_LANDED = 2, TD_FAILED = 3 };

typedef struct {
	uint64_t token; // of a write that completed here, or failed
	uint32_t data;  // TD_LANDED: what the peer's write brought along
	int32_t kind;
	int32_t err;
	int32_t own; // TD_FAILED: it is a write of ours
} td_event;

typedef struct {
	uint64_t from; // address here
	uint64_t to;   // address there, as the peer's registration has it
	uint64_t key;
	uint64_t len;
	td_mr *mr; // of from; may be null where the provider needs none
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
int td_poll(td_end *, td_event *, int n, int looks, const char **why);
const char *td_end_close(td_end *);

#endif
