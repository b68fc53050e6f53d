package tlsconf

import (
	"context"
	"crypto/x509"
	"log/slog"
	"slices"
	"time"
)

// ExpiryWarning is how long before the end of a certificate its renewal is due.
const ExpiryWarning = 30 * 24 * time.Hour

// Pauses of WarnExpiry.
const (
	expiryCheck  = time.Hour
	expiryRepeat = 24 * time.Hour
)

// expiry returns when the first of the certificates expires. There is at least one.
func expiry(chain []*x509.Certificate) time.Time {
	first := slices.MinFunc(chain, func(a, b *x509.Certificate) int { return a.NotAfter.Compare(b.NotAfter) })
	return first.NotAfter
}

// WarnExpiry logs a warning once a day while a certificate has less than ExpiryWarning left, until
// ctx ends. It calls until again for each check, because certificates are reloaded. advice is how
// to renew the certificate.
func WarnExpiry(ctx context.Context, log *slog.Logger, certificate, advice string, until func() time.Time) {
	tick := time.NewTicker(expiryCheck)
	defer tick.Stop()
	var warned time.Time
	for {
		end, now := until(), time.Now()
		if left := end.Sub(now); left < ExpiryWarning && now.Sub(warned) >= expiryRepeat {
			warned = now
			message := "certificate expires soon"
			if left <= 0 {
				message = "certificate has expired"
			}
			log.Warn(message, "certificate", certificate, "until", end.UTC().Format(time.RFC3339), "days", int(left.Hours()/24), "advice", advice)
		}
		select {
		case <-ctx.Done():
			return
		case <-tick.C:
		}
	}
}
