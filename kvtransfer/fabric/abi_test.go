//go:build cgo && linux

package fabric

import (
	"fmt"
	"strings"
)

// abiFields are the fields of abi.h's structures that the package uses; "=" before a structure: its size is libfabric's too.
const abiFields = `
ofi_ops size close bind control
=ofi_fid fclass context ops
ofi_tx_attr caps mode op_flags inject_size size iov_limit rma_iov_limit
ofi_ep_attr type protocol protocol_version max_msg_size
ofi_domain_attr domain name threading control_progress data_progress resource_mgmt av_type mr_mode mr_key_size cq_data_size
=ofi_fabric_attr fabric name prov_name prov_version api_version
ofi_info next caps mode addr_format src_addrlen dest_addrlen src_addr dest_addr handle tx_attr rx_attr ep_attr domain_attr fabric_attr
ofi_ops_fabric size domain
ofi_fabric=fid_fabric fid ops
=ofi_av_attr type rx_ctx_bits count ep_per_node name map_addr flags
=ofi_cq_attr size flags format wait_obj signaling_vector wait_cond wait_set
ofi_ops_domain size av_open cq_open endpoint
=ofi_mr=fid_mr fid mem_desc key
ofi_mr_attr mr_iov iov_count access offset requested_key context auth_key_size auth_key iface device
ofi_ops_mr size regattr
ofi_domain=fid_domain fid ops mr
ofi_ops_av size insert
ofi_av=fid_av fid ops
=ofi_cq_data_entry op_context flags len buf data
ofi_cq_err_entry op_context flags len buf data tag olen err prov_errno err_data err_data_size
ofi_ops_cq size read readerr strerror
ofi_cq=fid_cq fid ops
ofi_ops_cm size getname
=ofi_rma_iov addr len key
=ofi_msg_rma msg_iov desc iov_count addr rma_iov rma_iov_count context data
ofi_ops_rma size writemsg
ofi_ops_msg size recv inject
ofi_ep=fid_ep fid cm msg rma
=ofi_context2 internal`

// abiNumbers are abi.h's constants.
const abiNumbers = `MSG RMA WRITE RECV TRANSMIT REMOTE_WRITE REMOTE_CQ_DATA COMPLETION HMEM SOURCE CONTEXT CONTEXT2 MR_LOCAL MR_VIRT_ADDR
MR_ALLOCATED MR_PROV_KEY MR_HMEM ADDR_UNSPEC EP_RDM CQ_FORMAT_DATA WAIT_NONE THREAD_SAFE ENABLE HMEM_SYSTEM HMEM_CUDA EAVAIL ENOKEY`

// abiCheck is a C file that compiles only if abi.h says what libfabric's headers say. What newer headers add behind a field is no
// difference; FI_MR_DMABUF is compared where they have it.
func abiCheck() string {
	var b strings.Builder
	for _, h := range []string{"fabric", "fi_domain", "fi_endpoint", "fi_eq", "fi_cm", "fi_rma", "fi_errno"} {
		fmt.Fprintf(&b, "#include <rdma/%s.h>\n", h)
	}
	b.WriteString("#include \"abi.h\"\n")
	check := func(x, y string) { fmt.Fprintf(&b, "_Static_assert(%s == %s, \"%s\");\n", x, y, x) }
	structure := func(line string) {
		words := strings.Fields(strings.TrimPrefix(line, "="))
		ours, theirs, named := strings.Cut(words[0], "=")
		if !named {
			theirs = strings.Replace(ours, "ofi_", "fi_", 1)
			if ours == "ofi_fid" {
				theirs = "fid"
			}
		}
		for _, field := range words[1:] {
			check(fmt.Sprintf("offsetof(struct %s, %s)", ours, field), fmt.Sprintf("offsetof(struct %s, %s)", theirs, field))
			check(fmt.Sprintf("sizeof ((struct %s *)0)->%s", ours, field), fmt.Sprintf("sizeof ((struct %s *)0)->%s", theirs, field))
		}
		if strings.HasPrefix(line, "=") {
			check("sizeof (struct "+ours+")", "sizeof (struct "+theirs+")")
		}
	}
	for _, line := range strings.Split(strings.TrimSpace(abiFields), "\n") {
		structure(line)
	}
	for _, n := range strings.Fields(abiNumbers) {
		check("OFI_"+n, "FI_"+n)
	}
	check("OFI_VERSION(1, 17)", "FI_VERSION(1, 17)")
	b.WriteString("#ifdef FI_MR_DMABUF\n")
	check("OFI_MR_DMABUF", "FI_MR_DMABUF")
	structure("=ofi_mr_dmabuf fd offset len base_addr")
	b.WriteString("#endif\n")
	check("sizeof (struct ofi_mr_attr) >= sizeof (struct fi_mr_attr)", "1")
	check("sizeof (struct ofi_cq_err_entry) >= sizeof (struct fi_cq_err_entry)", "1")
	return b.String()
}
