package fleet

// control calls Options.Control with the state of the fleet, executes its events, and sets its next
// call.
func (f *fleet) control() {
	s := Sample{At: f.clock.now, Prefill: f.usage(f.prefill), Decode: f.usage(f.decode)}
	for _, g := range f.gateways {
		s.Waiting += g.waiting.Len()
		s.WaitingTokens += g.waiting.Tokens()
	}
	for _, e := range f.o.Control(&s) {
		f.do(e, nil) // of a Cancel, which needs a draw, there is none
	}
	f.clock.at(f.clock.now+f.o.ControlEvery, f.control)
}
