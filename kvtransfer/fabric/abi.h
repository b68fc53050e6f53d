// The part of libfabric's binary interface that this package uses: the arguments and results of the
// symbols of version FABRIC_1.3 (fi_fabric: FABRIC_1.1), which every libfabric since 1.3 exports.
// Names follow libfabric's, with ofi_x for fi_x, so that abi_test.go can compare sizes and offsets
// with the headers of an installed libfabric (1.17 in Debian 12). Fields that later versions append
// are not used. FI_MR_DMABUF is of 1.20, and only requested from a library of that version or
// later.
#ifndef TANDEM_FABRIC_ABI_H
#define TANDEM_FABRIC_ABI_H

#include <stddef.h>
#include <stdint.h>
#include <sys/types.h>
#include <sys/uio.h>

#define OFI_VERSION(major, minor) ((uint32_t)(major) << 16 | (minor))

// Capabilities, flags of operations and of completions.
#define OFI_MSG           (1ULL << 1)
#define OFI_RMA           (1ULL << 2)
#define OFI_WRITE         (1ULL << 9)
#define OFI_RECV          (1ULL << 10)
#define OFI_TRANSMIT      (1ULL << 11)
#define OFI_REMOTE_WRITE  (1ULL << 13)
#define OFI_REMOTE_CQ_DATA (1ULL << 17)
#define OFI_COMPLETION    (1ULL << 24)
#define OFI_MR_DMABUF     (1ULL << 40)
#define OFI_HMEM          (1ULL << 47)
#define OFI_SOURCE        (1ULL << 57)

// Modes: requirements on the caller.
#define OFI_CONTEXT  (1ULL << 59)
#define OFI_CONTEXT2 (1ULL << 52)

#define OFI_MR_LOCAL     (1 << 2)
#define OFI_MR_VIRT_ADDR (1 << 4)
#define OFI_MR_ALLOCATED (1 << 5)
#define OFI_MR_PROV_KEY  (1 << 6)
#define OFI_MR_HMEM      (1 << 10)

#define OFI_ADDR_UNSPEC ((uint64_t)-1)

enum { OFI_EP_RDM = 3, OFI_CQ_FORMAT_DATA = 3, OFI_WAIT_NONE = 0, OFI_THREAD_SAFE = 1 };
enum { OFI_ENABLE = 6 };
enum { OFI_HMEM_SYSTEM = 0, OFI_HMEM_CUDA = 1 };
enum { OFI_EAVAIL = 259, OFI_ENOKEY = 266 };

struct ofi_fid;
struct ofi_fabric;
struct ofi_domain;
struct ofi_av;
struct ofi_cq;
struct ofi_ep;
struct ofi_ops {
	size_t size;
	int (*close)(struct ofi_fid *);
	int (*bind)(struct ofi_fid *, struct ofi_fid *, uint64_t flags);
	int (*control)(struct ofi_fid *, int command, void *);
};
struct ofi_fid {
	size_t fclass;
	void *context;
	struct ofi_ops *ops;
};

struct ofi_tx_attr {
	uint64_t caps, mode, op_flags, msg_order, comp_order;
	size_t inject_size, size, iov_limit, rma_iov_limit;
	uint32_t tclass;
};
struct ofi_ep_attr {
	int type;
	uint32_t protocol, protocol_version;
	size_t max_msg_size;
};
struct ofi_domain_attr {
	struct ofi_domain *domain;
	char *name;
	int threading, control_progress, data_progress, resource_mgmt, av_type, mr_mode;
	size_t mr_key_size, cq_data_size;
};
struct ofi_fabric_attr {
	struct ofi_fabric *fabric;
	char *name, *prov_name;
	uint32_t prov_version, api_version;
};
struct ofi_info {
	struct ofi_info *next;
	uint64_t caps, mode;
	uint32_t addr_format;
	size_t src_addrlen, dest_addrlen;
	void *src_addr, *dest_addr;
	struct ofi_fid *handle;
	struct ofi_tx_attr *tx_attr;
	void *rx_attr;
	struct ofi_ep_attr *ep_attr;
	struct ofi_domain_attr *domain_attr;
	struct ofi_fabric_attr *fabric_attr;
};

struct ofi_ops_fabric {
	size_t size;
	int (*domain)(struct ofi_fabric *, struct ofi_info *, struct ofi_domain **, void *context);
	void *passive_ep, *eq_open, *wait_open;
	void *trywait;
};
struct ofi_fabric {
	struct ofi_fid fid;
	struct ofi_ops_fabric *ops;
};

struct ofi_av_attr {
	int type, rx_ctx_bits;
	size_t count, ep_per_node;
	const char *name;
	void *map_addr;
	uint64_t flags;
};
struct ofi_cq_attr {
	size_t size;
	uint64_t flags;
	int format, wait_obj, signaling_vector, wait_cond;
	void *wait_set;
};
struct ofi_ops_domain {
	size_t size;
	int (*av_open)(struct ofi_domain *, struct ofi_av_attr *, struct ofi_av **, void *context);
	int (*cq_open)(struct ofi_domain *, struct ofi_cq_attr *, struct ofi_cq **, void *context);
	int (*endpoint)(struct ofi_domain *, struct ofi_info *, struct ofi_ep **, void *context);
};
struct ofi_mr {
	struct ofi_fid fid;
	void *mem_desc;
	uint64_t key;
};
// Since 1.20; mr_iov of ofi_mr_attr points to it under FI_MR_DMABUF.
struct ofi_mr_dmabuf {
	int fd;
	uint64_t offset;
	size_t len;
	void *base_addr;
};
struct ofi_mr_attr {
	const void *mr_iov; // struct iovec, or struct ofi_mr_dmabuf
	size_t iov_count;
	uint64_t access, offset, requested_key;
	void *context;
	size_t auth_key_size;
	uint8_t *auth_key;
	int iface;
	union {
		uint64_t reserved;
		int cuda;
	} device;
	void *later[8]; // fields of later versions, zero
};
struct ofi_ops_mr {
	size_t size;
	void *reg, *regv;
	int (*regattr)(struct ofi_fid *, const struct ofi_mr_attr *, uint64_t flags, struct ofi_mr **);
};
struct ofi_domain {
	struct ofi_fid fid;
	struct ofi_ops_domain *ops;
	struct ofi_ops_mr *mr;
};

struct ofi_ops_av {
	size_t size;
	int (*insert)(struct ofi_av *, const void *addr, size_t count, uint64_t *fi_addr, uint64_t flags, void *context);
};
struct ofi_av {
	struct ofi_fid fid;
	struct ofi_ops_av *ops;
};

struct ofi_cq_data_entry {
	void *op_context;
	uint64_t flags;
	size_t len;
	void *buf;
	uint64_t data;
};
struct ofi_cq_err_entry {
	void *op_context;
	uint64_t flags;
	size_t len;
	void *buf;
	uint64_t data, tag;
	size_t olen;
	int err, prov_errno;
	void *err_data;
	size_t err_data_size;
	void *later[4]; // zero, too
};
struct ofi_ops_cq {
	size_t size;
	ssize_t (*read)(struct ofi_cq *, void *buf, size_t count);
	void *readfrom;
	ssize_t (*readerr)(struct ofi_cq *, struct ofi_cq_err_entry *, uint64_t flags);
	void *sread, *sreadfrom, *signal;
	const char *(*strerror)(struct ofi_cq *, int prov_errno, const void *err_data, char *buf, size_t len);
};
struct ofi_cq {
	struct ofi_fid fid;
	struct ofi_ops_cq *ops;
};

struct ofi_ops_cm {
	size_t size;
	void *setname;
	int (*getname)(struct ofi_fid *, void *addr, size_t *addrlen);
};
struct ofi_rma_iov {
	uint64_t addr;
	size_t len;
	uint64_t key;
};
struct ofi_msg_rma {
	const struct iovec *msg_iov;
	void **desc;
	size_t iov_count;
	uint64_t addr;
	const struct ofi_rma_iov *rma_iov;
	size_t rma_iov_count;
	void *context;
	uint64_t data;
};
struct ofi_ops_rma {
	size_t size;
	void *read, *readv, *readmsg, *write, *writev;
	ssize_t (*writemsg)(struct ofi_ep *, const struct ofi_msg_rma *, uint64_t flags);
};
struct ofi_ops_msg {
	size_t size;
	ssize_t (*recv)(struct ofi_ep *, void *buf, size_t len, void *desc, uint64_t src_addr, void *context);
	void *recvv, *recvmsg, *send, *sendv, *sendmsg;
	ssize_t (*inject)(struct ofi_ep *, const void *buf, size_t len, uint64_t dest_addr);
};
struct ofi_ep {
	struct ofi_fid fid;
	void *ops;
	struct ofi_ops_cm *cm;
	struct ofi_ops_msg *msg;
	struct ofi_ops_rma *rma;
};

// The size of an operation's context under the mode FI_CONTEXT2.
struct ofi_context2 {
	void *internal[8];
};

#endif
