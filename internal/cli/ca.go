package cli

import (
	"cmp"
	"encoding/json"
	"errors"
	"fmt"
	"path/filepath"
	"slices"
	"strings"
	"text/tabwriter"
	"time"

	"github.com/tandem-serving/tandem/internal/config"
	"github.com/tandem-serving/tandem/internal/kubernetes"
	"github.com/tandem-serving/tandem/internal/tlsconf"
)

// certificates creates, renews or lists the certificates of a cluster.
func certificates(v *Invocation) error {
	hosts := v.StringSlice("host", nil, "further names and addresses in the nodes' certificates")
	within := v.Duration("within", 0, "with renew and --kubernetes-secret: only certificates that expire within this time, such as 720h; 0: with renew all, with the Secret those that have expired")
	asJSON := v.Bool("json", false, "with list: one JSON object a line")
	secret := v.String("kubernetes-secret", "", "Secret that exists, as NAMESPACE/NAME, instead of DIR: it gets the authority, and the certificates that it lacks, as NAME.crt and NAME.key")
	var api kubernetes.Options
	KubernetesFlags(v.Set, &api, "--kubernetes-secret")
	args, err := v.Parse(1 << 10)
	if err != nil {
		return err
	}
	if *secret != "" {
		return secretCertificates(v, api, *secret, args, *hosts, *within)
	}
	do := ""
	if len(args) > 0 && (args[0] == "renew" || args[0] == "list") {
		do, args = args[0], args[1:]
	}
	if len(args) == 0 {
		return fmt.Errorf("%w: give the folder of the authority", config.ErrValue)
	}
	switch dir, names := args[0], args[1:]; do {
	case "list":
		return listCertificates(v, dir, *asJSON)
	case "renew":
		return renewCertificates(v, dir, names, *hosts, *within)
	default:
		// A folder is made only for a command that can be meant.
		if tlsconf.CheckName(dir) == nil && strings.Contains(dir, "/") {
			return fmt.Errorf("%w: give the folder of the authority first, as in `tandem ca ./certs %s`", config.ErrValue, dir)
		}
		for _, name := range names {
			if err := tlsconf.CheckName(name); err != nil {
				return fmt.Errorf("%w: %w", config.ErrValue, err)
			}
		}
		if err := tlsconf.CreateCA(dir); err != nil && !errors.Is(err, tlsconf.ErrExists) {
			return err
		}
		if len(names) == 0 {
			fmt.Fprintf(v.ErrOut, "%s has an authority; `tandem ca %s gateway/NAME node/NAME` issues certificates\n", dir, dir)
		}
		for _, name := range names {
			if err := issue(v, dir, name, *hosts); err != nil {
				return err
			}
		}
		return nil
	}
}

// issue creates or renews one certificate and prints its folder.
func issue(v *Invocation, dir, name string, hosts []string) error {
	folder, err := tlsconf.IssueNode(dir, name, hosts)
	if errors.Is(err, tlsconf.ErrName) {
		return fmt.Errorf("%w: %w", config.ErrValue, err)
	} else if err != nil {
		return err
	}
	fmt.Fprintln(v.Out, folder)
	switch id, err := tlsconf.FolderIdentity(folder); {
	case err != nil:
		return err
	case id.Role == tlsconf.NoRole:
		fmt.Fprintf(v.ErrOut, "warning: the certificate of %s has no role: %s\n", name, tlsconf.Reissue)
	}
	return nil
}

// renewCertificates renews the certificates of the names, or of all nodes, that expire within a
// time. Roles and hosts stay, unless hosts are given.
func renewCertificates(v *Invocation, dir string, names, hosts []string, within time.Duration) error {
	all, err := tlsconf.Inspect(dir)
	if err != nil {
		return err
	}
	wanted := map[string]bool{}
	for _, name := range names {
		wanted[name[strings.LastIndexByte(name, '/')+1:]] = true
	}
	due, issued := time.Now().Add(within), 0
	for _, h := range all {
		if h.Authority {
			if time.Until(h.NotAfter) < tlsconf.NodeLifetime {
				fmt.Fprintf(v.ErrOut, "warning: the authority in %s expires on %s, and certificates are of no use after it: create a new authority and certificates of it for all nodes\n",
					dir, h.NotAfter.UTC().Format(time.DateOnly))
			}
			continue
		}
		name := filepath.Base(h.Folder)
		if len(names) > 0 && !wanted[name] {
			continue
		}
		delete(wanted, name)
		if within > 0 && h.NotAfter.After(due) {
			continue
		}
		again := hosts
		if len(again) == 0 {
			again = h.Hosts
		}
		if err := issue(v, dir, name, again); err != nil {
			return err
		}
		issued++
	}
	if issued == 0 && len(wanted) == 0 {
		fmt.Fprintf(v.ErrOut, "no certificate in %s expires within %.0f hours\n", dir, within.Hours())
	}
	for name := range wanted {
		return fmt.Errorf("%w: %s has no certificate of %q to renew: `tandem ca %s ROLE/%s` issues one", config.ErrValue, dir, name, dir, name)
	}
	return nil
}

// listCertificates prints the certificates of a folder, with their ends.
func listCertificates(v *Invocation, dir string, asJSON bool) error {
	all, err := tlsconf.Inspect(dir)
	if err != nil {
		return err
	}
	type row struct {
		Folder  string    `json:"folder"`
		Role    string    `json:"role"`
		Name    string    `json:"name"`
		Hosts   []string  `json:"hosts,omitempty"`
		Expires time.Time `json:"expires"`
		Days    int       `json:"days"` // left
		State   string    `json:"state"`
	}
	t := tabwriter.NewWriter(v.Out, 0, 8, 2, ' ', 0)
	if !asJSON {
		fmt.Fprintln(t, "FOLDER\tROLE\tNAME\tHOSTS\tEXPIRES\tDAYS\tSTATE")
	}
	slices.SortStableFunc(all, func(a, b tlsconf.Held) int { return a.NotAfter.Compare(b.NotAfter) })
	for _, h := range all {
		left := time.Until(h.NotAfter)
		r := row{h.Folder, string(h.Role), h.Name, h.Hosts, h.NotAfter.UTC(), int(left.Hours() / 24), "valid"}
		switch {
		case h.Authority:
			r.Role = "authority"
		case h.Role == tlsconf.NoRole:
			r.Role = "none"
		}
		switch {
		case h.Err != nil:
			r.State = h.Err.Error()
		case left <= 0:
			r.State = "expired"
		case time.Now().Before(h.NotBefore):
			r.State = "not valid yet"
		case left < tlsconf.ExpiryWarning:
			r.State = "expires soon"
		}
		if asJSON {
			if err := json.NewEncoder(v.Out).Encode(r); err != nil {
				return err
			}
			continue
		}
		fmt.Fprintf(t, "%s\t%s\t%s\t%s\t%s\t%d\t%s\n", r.Folder, r.Role, r.Name, cmp.Or(strings.Join(r.Hosts, ","), "-"), r.Expires.Format(time.DateOnly), r.Days, r.State)
	}
	return t.Flush()
}
