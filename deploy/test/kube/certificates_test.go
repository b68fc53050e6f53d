//go:build deploy && linux

package kube

import (
	"crypto/tls"
	"crypto/x509"
	"fmt"
	"net"
	"testing"
	"time"
)

// A Job renews the certificates in the Secret while streams run. The processes have the volume's new
// files without a restart, and no stream fails.
func (f *fleet) testCertificates(t *testing.T) {
	l := f.load(t)
	addresses := map[string]string{}
	for _, p := range f.running(t, "prefill") {
		addresses[p.Name] = net.JoinHostPort(p.Status.PodIP, "7101")
	}
	for _, p := range f.running(t, "decode") {
		addresses[p.Name] = net.JoinHostPort(p.Status.PodIP, "7102")
	}
	before := map[string]string{}
	for name, at := range addresses {
		serial, err := served(at)
		if err != nil {
			t.Fatal(err)
		}
		before[name] = serial
	}
	f.disturb(t, l, func() {
		f.upgrade(t, "--set", "certificates.job.renewWithin=87600h")
		for name, at := range addresses {
			f.Until(t, settleBound, name+" serves another certificate", func() error {
				serial, err := served(at)
				if err == nil && serial == before[name] {
					err = fmt.Errorf("it serves %s", serial)
				}
				return err
			})
		}
		// Connections that are made now are between processes with new certificates, and between these
		// and processes that have not read them.
		f.Run(t, "kubectl", "-n", namespace, "delete", "pod", f.running(t, "gateway")[0].Name, "--wait=false")
		f.rolledOut(t, "gateway")
	})
	for _, component := range []string{"prefill", "decode"} {
		for _, p := range f.running(t, component) {
			if _, same := addresses[p.Name]; !same || p.Status.ContainerStatuses[0].RestartCount > 0 {
				t.Errorf("%s is not the process of before", p.Name)
			}
		}
	}
}

// served returns the serial number of the certificate at a port that refuses clients without one.
func served(address string) (serial string, err error) {
	conn, err := tls.DialWithDialer(&net.Dialer{Timeout: 5 * time.Second}, "tcp", address, &tls.Config{
		InsecureSkipVerify: true,
		VerifyPeerCertificate: func(raw [][]byte, _ [][]*x509.Certificate) error {
			c, err := x509.ParseCertificate(raw[0])
			if err == nil {
				serial = c.SerialNumber.String()
			}
			return err
		},
	})
	if err == nil {
		conn.Close()
	}
	if serial != "" {
		err = nil // the server may refuse what has no certificate of its own
	}
	return serial, err
}
