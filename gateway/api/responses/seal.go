package responses

import (
	"bytes"
	"crypto/aes"
	"crypto/cipher"
	"crypto/hkdf"
	"crypto/sha256"
	"encoding/base64"
	"encoding/binary"
	"errors"
	"fmt"
	"strings"
)

// Keys seal the reasoning of answers for clients that send it back, and open it again. Any
// goroutine may use them.
//
// Sealed text is the base64 form of a version, the key's id, a random nonce and the text under
// AES-256-GCM. The associated data are version, key id, model and owner.
type Keys struct{ all []sealer }

// sealer has one key.
type sealer struct {
	id   [sealIDBytes]byte
	aead cipher.AEAD // which makes the nonce
}

const (
	sealVersion = 1
	sealIDBytes = 4
	sealHead    = 1 + sealIDBytes // bytes before the nonce
	sealLabel   = "tandem response reasoning 1"

	// MinSecret is the number of bytes that a secret has at least.
	MinSecret = 32
	maxKeys   = 64
)

// Errors of Keys.
var (
	ErrSecret  = errors.New("responses: bad secret for encrypted reasoning")
	errSealed  = errors.New("it is not in the form of this gateway")
	errKey     = errors.New("its key is not one of this gateway's")
	errForeign = errors.New("it was changed, or belongs to another model or API key")
)

// NewKeys returns keys that are derived from secrets. The first one seals, all of them open.
func NewKeys(secrets ...[]byte) (*Keys, error) {
	if n := len(secrets); n < 1 || n > maxKeys {
		return nil, fmt.Errorf("%w: want 1 to %d, not %d", ErrSecret, maxKeys, n)
	}
	k := &Keys{all: make([]sealer, len(secrets))}
	for i, secret := range secrets {
		if len(secret) < MinSecret {
			return nil, fmt.Errorf("%w: number %d has %d bytes, want at least %d", ErrSecret, i+1, len(secret), MinSecret)
		}
		key, err := hkdf.Key(sha256.New, secret, nil, sealLabel, sha256.Size)
		if err != nil {
			return nil, fmt.Errorf("responses: derive a key: %w", err)
		}
		block, err := aes.NewCipher(key)
		if err == nil {
			k.all[i].aead, err = cipher.NewGCMWithRandomNonce(block)
		}
		if err != nil {
			return nil, fmt.Errorf("responses: make a cipher: %w", err)
		}
		id := sha256.Sum256(key)
		copy(k.all[i].id[:], id[:])
	}
	return k, nil
}

// ReadSecrets returns the secrets of a file, which has one in each line. Empty lines and lines that
// begin with # are skipped. Errors never contain a secret.
func ReadSecrets(text []byte) (secrets [][]byte, err error) {
	n := 0
	for line := range bytes.Lines(text) {
		n++
		if line = bytes.TrimSpace(line); len(line) == 0 || line[0] == '#' {
			continue
		}
		if bytes.ContainsAny(line, " \t") {
			return nil, fmt.Errorf("%w: line %d has a space", ErrSecret, n)
		}
		if len(line) < MinSecret {
			return nil, fmt.Errorf("%w: line %d has %d characters, want at least %d, as of openssl rand -hex 32", ErrSecret, n, len(line), MinSecret)
		}
		secrets = append(secrets, line)
	}
	if len(secrets) == 0 {
		return nil, fmt.Errorf("%w: the file has none", ErrSecret)
	}
	return secrets, nil
}

// appendContext appends the associated data. The model's length separates it from the owner.
func (s *sealer) appendContext(dst []byte, model, owner string) []byte {
	dst = append(append(dst, sealVersion), s.id[:]...)
	dst = binary.BigEndian.AppendUint32(dst, uint32(len(model)))
	return append(append(dst, model...), owner...)
}

// appendSealed appends the sealed form of a text.
func (k *Keys) appendSealed(dst, text []byte, model, owner string) []byte {
	s := &k.all[0]
	sealed := append(append(make([]byte, 0, sealHead+s.aead.Overhead()+len(text)), sealVersion), s.id[:]...)
	sealed = s.aead.Seal(sealed, nil, text, s.appendContext(nil, model, owner))
	return base64.StdEncoding.AppendEncode(dst, sealed)
}

// open returns the text of its sealed form.
func (k *Keys) open(sealed, model, owner string) ([]byte, error) {
	// Clients may have removed the padding.
	b, err := base64.RawStdEncoding.DecodeString(strings.TrimRight(sealed, "="))
	if err != nil || len(b) < sealHead || b[0] != sealVersion {
		return nil, errSealed
	}
	for i := range k.all {
		s := &k.all[i]
		if !bytes.Equal(s.id[:], b[1:sealHead]) {
			continue
		}
		text, err := s.aead.Open(nil, nil, b[sealHead:], s.appendContext(nil, model, owner))
		if err != nil {
			return nil, errForeign
		}
		return text, nil
	}
	return nil, errKey
}
