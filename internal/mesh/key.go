// SPDX-License-Identifier: Apache-2.0

package mesh

import (
	"bytes"
	"crypto/ecdh"
	"encoding/base64"
	"fmt"
)

// KeySize is the length in bytes of every WireGuard key.
const KeySize = 32

// PublicKey is a WireGuard public key (Curve25519). The zero value is no key.
type PublicKey [KeySize]byte

// ParsePublicKey reads the standard base64 form that wg(8) prints. The zero
// key is refused: no private key belongs to it.
func ParsePublicKey(s string) (PublicKey, error) {
	k, err := parseKey(s)
	return PublicKey(k), err
}

// String returns the base64 form that wg(8) prints, "" for no key.
func (k PublicKey) String() string {
	if k.IsZero() {
		return ""
	}
	return base64.StdEncoding.EncodeToString(k[:])
}

// IsZero reports whether k is no key.
func (k PublicKey) IsZero() bool { return k == PublicKey{} }

// Compare orders keys by their bytes.
func (k PublicKey) Compare(o PublicKey) int { return bytes.Compare(k[:], o[:]) }

// MarshalText implements encoding.TextMarshaler.
func (k PublicKey) MarshalText() ([]byte, error) { return []byte(k.String()), nil }

// UnmarshalText implements encoding.TextUnmarshaler. What MarshalText makes of no key is none.
func (k *PublicKey) UnmarshalText(text []byte) error {
	if len(text) == 0 {
		*k = PublicKey{}
		return nil
	}
	p, err := ParsePublicKey(string(text))
	if err != nil {
		return err
	}
	*k = p
	return nil
}

// hidden is what every printed secret looks like, as in wg(8).
const hidden = "(hidden)"

// SecretKey is a WireGuard private or preshared key. However it is printed,
// logged or marshalled, it shows as "(hidden)"; Reveal is the only way out.
// The zero value is no key.
type SecretKey struct{ b [KeySize]byte }

// NewSecretKey wraps key material.
func NewSecretKey(b [KeySize]byte) SecretKey { return SecretKey{b} }

// ParseSecretKey reads the standard base64 form that wg(8) prints. The zero
// key is refused. The error never quotes the input.
func ParseSecretKey(s string) (SecretKey, error) {
	b, err := parseKey(s)
	if err != nil {
		return SecretKey{}, fmt.Errorf("secret key %s: want the base64 form of %d bytes that are not all zero", hidden, KeySize)
	}
	return SecretKey{b}, nil
}

// Reveal returns the key material, for the kernel and the key file alone.
func (k SecretKey) Reveal() [KeySize]byte { return k.b }

// Public returns the public key that belongs to k (RFC 7748).
func (k SecretKey) Public() (PublicKey, error) {
	p, err := ecdh.X25519().NewPrivateKey(k.b[:])
	if err != nil {
		return PublicKey{}, fmt.Errorf("secret key %s: %w", hidden, err)
	}
	return PublicKey(p.PublicKey().Bytes()), nil
}

// IsZero reports whether k is no key.
func (k SecretKey) IsZero() bool { return k == SecretKey{} }

// Format implements fmt.Formatter: every verb prints "(hidden)".
func (SecretKey) Format(f fmt.State, _ rune) { _, _ = f.Write([]byte(hidden)) }

// String implements fmt.Stringer.
func (SecretKey) String() string { return hidden }

// MarshalText implements encoding.TextMarshaler, which also covers JSON and slog.
func (SecretKey) MarshalText() ([]byte, error) { return []byte(hidden), nil }

func parseKey(s string) ([KeySize]byte, error) {
	b, err := base64.StdEncoding.DecodeString(s)
	if err != nil || len(b) != KeySize {
		return [KeySize]byte{}, fmt.Errorf("key %q: want the base64 form of %d bytes, 44 characters", s, KeySize)
	}
	if bytes.Equal(b, make([]byte, KeySize)) {
		return [KeySize]byte{}, fmt.Errorf("key %q: want a key that is not all zero", s)
	}
	return [KeySize]byte(b), nil
}
