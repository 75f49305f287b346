// SPDX-License-Identifier: Apache-2.0

package host

// Op says what a Change did.
type Op string

// The operations. A replaced object was there before, in another form.
const (
	OpAdd     Op = "add"
	OpReplace Op = "replace"
	OpDelete  Op = "delete"
)

// Kind says what a Change was done to.
type Kind string

// The kinds of object that Apply writes.
const (
	KindLink   Kind = "link"
	KindAddr   Kind = "addr"
	KindRoute  Kind = "route"
	KindRule   Kind = "rule"
	KindNeigh  Kind = "neigh"  // of the vxlan link, and where its frames go
	KindDevice Kind = "device" // private key and port of the WireGuard device
	KindPeer   Kind = "peer"   // of the WireGuard device
	KindTable  Kind = "table"  // of nftables, with all its content
	KindSet    Kind = "set"    // of nftables
	KindChain  Kind = "chain"  // of iptables: in FORWARD our rules, else only what other releases left
	KindSysctl Kind = "sysctl"
)

// Change is one write that Apply made.
type Change struct {
	Op   Op
	Kind Kind
	// Text is the object in the syntax of ip(8), wg(8), nft(8) or sysctl(8).
	// It never holds a secret.
	Text string
}

// String returns the command that would do the same, for errors and tests.
func (c Change) String() string {
	ipOp := map[Op]string{OpAdd: "add", OpReplace: "replace", OpDelete: "del"}[c.Op]
	switch c.Kind {
	case KindLink:
		if c.Op == OpReplace {
			return "ip link set " + c.Text
		}
		return "ip link " + ipOp + " " + c.Text
	case KindAddr, KindRoute, KindRule:
		return "ip " + string(c.Kind) + " " + ipOp + " " + c.Text
	case KindDevice, KindPeer:
		return "wg set " + c.Text
	case KindTable, KindSet:
		return "nft " + string(c.Op) + " " + string(c.Kind) + " " + c.Text
	case KindSysctl:
		return "sysctl " + c.Text
	default:
		return string(c.Op) + " " + string(c.Kind) + " " + c.Text
	}
}
