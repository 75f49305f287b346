// SPDX-License-Identifier: Apache-2.0

package lab

import (
	"strings"
	"testing"
)

func TestDemoIsValid(t *testing.T) {
	for _, s := range []Stack{IPv4, IPv6, Dual} {
		if err := Demo(s).Validate(); err != nil {
			t.Errorf("Demo(%s): %v", s, err)
		}
	}
}

func TestValidateNamesWhatIsWrong(t *testing.T) {
	for _, tt := range []struct {
		name   string
		change func(*Spec)
		want   string
	}{
		{"stack", func(s *Spec) { s.Stack = "5" }, `stack "5": want 4, 6 or dual`},
		{"cloud twice", func(s *Spec) { s.Clouds = append(s.Clouds, CloudSpec{Name: "a"}) }, `cloud "a": is there twice`},
		{"cloud name", func(s *Spec) { s.Clouds[0].Name = "A" }, `cloud "A": want a name`},
		{"unknown nat", func(s *Spec) { s.Clouds[1].NAT = "cone" }, `cloud "b": nat "cone": want one of`},
		{"nat without network", func(s *Spec) { s.Clouds[0].NAT = NATSymmetric }, `without a network`},
		{"host twice", func(s *Spec) { s.Hosts = append(s.Hosts, s.Hosts[0]) }, `host "a1": the name is taken`},
		{"reserved name", func(s *Spec) { s.Hosts[0].Name = ControlPlaneName }, `host "control": the name is taken`},
		{"router's name", func(s *Spec) { s.Hosts[0].Name = "b-router" }, `host "b-router": the name is taken`},
		{"long name", func(s *Spec) { s.Hosts[0].Name = "abcdefghijklm" }, `want a name of 1 to 12`},
		{"no cloud", func(s *Spec) { s.Hosts[0].Cloud = "x" }, `there is no cloud "x"`},
		{"no address", func(s *Spec) { s.Hosts[0].Public = false }, `want a public or a private address`},
		{"no network", func(s *Spec) { s.Hosts[0].Private = true }, `private, but cloud "a" has no network`},
	} {
		t.Run(tt.name, func(t *testing.T) {
			s := Demo(IPv4)
			tt.change(&s)
			err := s.Validate()
			if err == nil || !strings.Contains(err.Error(), tt.want) {
				t.Errorf("Validate() = %v, want %q", err, tt.want)
			}
		})
	}
}
