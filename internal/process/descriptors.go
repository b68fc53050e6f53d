package process

import (
	"fmt"
	"syscall"
)

// Descriptors is how many file descriptors a process needs, by purpose.
type Descriptors struct {
	Own    int // listeners, files, the runtime
	Links  int // to other processes of the fleet: at least
	Client int // connections of clients, or of scrapers: at least
	Each   int // per client: its connection and those to upstreams
}

// Descriptors by role. Idle processes use 20 to 35 of their own.
var (
	GatewayDescriptors = Descriptors{Own: 48, Links: 32, Client: 16, Each: 1}
	AloneDescriptors   = Descriptors{Own: 48, Client: 16, Each: 1} // without a fleet
	NodeDescriptors    = Descriptors{Own: 40, Links: 16, Client: 8, Each: 1}
)

// maxLinks bounds the descriptors kept for links: the connections that rpc and NATS accept.
const maxLinks = 2 * 4096

// DescriptorLimit returns the number of files that this process may open. Go raises the
// soft limit to the hard one at start.
func DescriptorLimit() (int, error) {
	var r syscall.Rlimit
	if err := syscall.Getrlimit(syscall.RLIMIT_NOFILE, &r); err != nil {
		return 0, fmt.Errorf("read the limit on file descriptors: %w", err)
	}
	return int(min(uint64(r.Cur), 1<<30)), nil
}

// Clients returns how many clients may be connected within limit. An eighth of a large
// limit is kept for links, so that clients cannot starve them. The error wraps
// ErrOption if the limit is too low to start.
func (d Descriptors) Clients(limit int) (int, error) {
	links := d.Links
	if links > 0 {
		links = max(links, min(limit/8, maxLinks))
	}
	n := (limit - d.Own - links) / d.Each
	if least := d.Own + d.Links + d.Each*d.Client; limit < least {
		return 0, fmt.Errorf("%w: the limit of %d file descriptors is too low: at least %d are needed, %d for the process itself, %d for links to other processes and %d for connections of clients; raise it with ulimit -n %d or more (systemd: LimitNOFILE=, Docker: --ulimit nofile=)",
			ErrOption, limit, least, d.Own, d.Links, d.Each*d.Client, max(1024, least))
	}
	return n, nil
}

// Connections returns how many connections clients may have: want, or fewer if the limit on
// file descriptors requires it. It logs the lower number, as a warning if the user set want
// and as information if want is the default.
func (p *Process) Connections(d Descriptors, want int, asked bool) (int, error) {
	limit, err := DescriptorLimit()
	if err != nil {
		return 0, err
	}
	most, err := d.Clients(limit)
	if err != nil {
		return 0, err
	}
	if want > most {
		log := p.Log.Info
		if asked {
			log = p.Log.Warn
		}
		log("--max-connections is lowered to fit the limit on file descriptors", "from", want, "to", most, "limit", limit, "kept", limit-d.Each*most)
	}
	return min(want, most), nil
}
