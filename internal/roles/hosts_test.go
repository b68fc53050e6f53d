package roles

import (
	"path/filepath"
	"strings"
	"testing"

	"github.com/tandem-serving/tandem/internal/tlsconf"
)

// Addresses that a person writes in one flag too many or in another form are refused with the form,
// and IPv6 addresses may have brackets.
func TestHostsAndPorts(t *testing.T) {
	ca := filepath.Join(t.TempDir(), "ca")
	if err := tlsconf.CreateCA(ca); err != nil {
		t.Fatal(err)
	}
	folder, err := tlsconf.IssueNode(ca, "gateway/local", nil)
	if err != nil {
		t.Fatal(err)
	}
	for args, want := range map[string]string{
		"serve --host 127.0.0.1:8000":                        "is not a host, such as 127.0.0.1, ::1 or a name; the port has a flag of its own",
		"serve --host http://127.0.0.1":                      "is not a host",
		"serve --host [::1]:8000":                            "is not a host",
		"serve --host [::1]":                                 "",
		"serve --host ::1":                                   "",
		"serve --host localhost":                             "",
		"serve --admin-listen ::1:9000":                      "such as 127.0.0.1:9000 or [::1]:9000",
		"serve --admin-listen 9000":                          "such as 127.0.0.1:9000 or [::1]:9000",
		"decode --tls-dir CERTS --join http://10.0.0.1:7946": "want host:port of a member's gossip, such as 10.0.0.1:7946 or [fd00::1]:7946",
		"decode --tls-dir CERTS --join 10.0.0.1:gossip":      "want host:port",
		"decode --tls-dir CERTS --join 10.0.0.1:70000":       "want host:port",
		"prefill --tls-dir CERTS --join fd00::1:7946:x":      "want host:port",
		"gateway --tls-dir CERTS --join :7946":               "want host:port",
		"gateway --tls-dir CERTS --join fd00::1,[fd00::1],gossip.example,[fd00::1]:7946,10.0.0.1": "",
		"decode --tls-dir CERTS --host [::1]":                                                     "",
		"decode --tls-dir CERTS --host 127.0.0.1:7102":                                            "is not a host",
		"gateway --tls-dir CERTS --advertise [fd00::1]":                                           "",
	} {
		var out, errOut strings.Builder
		args = strings.Replace(args, "CERTS", folder, 1)
		status := Main("0", append(strings.Fields(args), "--dry-run"), nil, &out, &errOut)
		if want == "" && status != 0 || want != "" && (status != 2 || !strings.Contains(errOut.String(), want)) {
			t.Errorf("%s: status %d, %s, want %q", args, status, errOut.String(), want)
		}
	}
}
