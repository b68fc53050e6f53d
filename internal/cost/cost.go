// Package cost computes the price of tokens from the price of nodes.
//
// The price of a million tokens is the price of the nodes divided by the tokens that they serve
// meanwhile. With pools of prefill and decode nodes, prompts pay for the one pool and answers for
// the other. Without pools one price counts for both.
//
// Invariant: the package rounds nothing, and no result is NaN or infinite: a price that has no
// tokens to divide by is 0.
//
// Prices are in US dollars. The package is pure.
package cost

import "math"

// HoursPerMonth is the mean number of hours of a month.
const HoursPerMonth = 730

// hoursPerYear is the number of hours of a year of 365 days.
const hoursPerYear = 8760

// million is the number of tokens of a price.
const million = 1e6

// Machine is a machine that its user owns.
type Machine struct {
	Capex        float64 // price of purchase
	Years        float64 // until it is written off
	Availability float64 // share of the time in which it works
	Watts        float64 // power
	PUE          float64 // power of the data center for each watt of the machine
	PerKWh       float64 // price of energy
	Ops          float64 // per hour: space, staff, spare parts
}

// PerHour returns the price of an hour in which the machine works.
func (m Machine) PerHour() float64 {
	return ratio(m.Capex, m.Years*hoursPerYear*m.Availability) + m.Watts*m.PUE*m.PerKWh/1000 + m.Ops
}

// Fleet is the price of a fleet and the tokens that it serves.
type Fleet struct {
	Prefill, Decode float64 // per hour, of all nodes of a pool; colocated nodes count as decode
	Overhead        float64 // share that is added to each price, such as .1 for gateways and staff

	In, Out  float64 // tokens per second of prompts and of answers
	Cached   float64 // tokens per second of In that prefix caches hold
	ReadCost float64 // time to read a cached token's KV divided by the time to compute the token
	Requests float64 // per second
	Good     float64 // share of requests that meet every objective
}

// Hourly returns the price of an hour.
func (f Fleet) Hourly() float64 { return (f.Prefill + f.Decode) * (1 + f.Overhead) }

// Blended returns the price of a million tokens of prompts and answers.
func (f Fleet) Blended() float64 { return perMillion(f.Hourly(), f.In+f.Out) }

// AllOnOutput returns the price of a million answer tokens if prompts are free.
func (f Fleet) AllOnOutput() float64 { return perMillion(f.Hourly(), f.Out) }

// Pools reports whether prompts and answers have prices of their own.
func (f Fleet) Pools() bool { return f.Prefill > 0 && f.Decode > 0 }

// Input returns the price of a million prompt tokens: of the prefill nodes, or without pools the
// blended price.
func (f Fleet) Input() float64 {
	if !f.Pools() {
		return f.Blended()
	}
	return perMillion(f.Prefill*(1+f.Overhead), f.In)
}

// Output returns the price of a million answer tokens: of the decode nodes, or without pools the
// blended price.
func (f Fleet) Output() float64 {
	if !f.Pools() {
		return f.Blended()
	}
	return perMillion(f.Decode*(1+f.Overhead), f.Out)
}

// CachedInput returns the price of a million prompt tokens that prefix caches hold: the share of
// the price of a computed token that reading its KV takes.
func (f Fleet) CachedInput() float64 { return f.Input() * min(1, max(0, f.ReadCost)) }

// GoodTokens returns the price of a million tokens of requests that meet every objective.
func (f Fleet) GoodTokens() float64 { return ratio(f.Blended(), f.Good) }

// PerThousandRequests returns the price of a thousand requests.
func (f Fleet) PerThousandRequests() float64 { return ratio(f.Hourly()/3600*1000, f.Requests) }

// Monthly returns the price of a month.
func (f Fleet) Monthly() float64 { return f.Hourly() * HoursPerMonth }

// Idle returns the price of an hour's share in which nodes do not work. duty is the share of the
// time in which they do.
func (f Fleet) Idle(duty float64) float64 { return f.Hourly() * (1 - min(1, max(0, duty))) }

// Of returns the price of so many prompt and answer tokens, such as those of an API key.
func (f Fleet) Of(in, out float64) float64 { return (in*f.Input() + out*f.Output()) / million }

// BreakEven returns the tokens of a month from which on the fleet is cheaper than an API with these
// prices of a million prompt and answer tokens.
func (f Fleet) BreakEven(apiInput, apiOutput float64) float64 {
	share := ratio(f.In, f.In+f.Out)
	return ratio(f.Monthly()*million, apiInput*share+apiOutput*(1-share))
}

// perMillion returns the price of a million tokens of nodes that serve so many tokens per second.
func perMillion(hourly, tokensPerSecond float64) float64 {
	return ratio(hourly*million, tokensPerSecond*3600)
}

// ratio returns a/b, and 0 if that is no finite number.
func ratio(a, b float64) float64 {
	if r := a / b; b != 0 && !math.IsInf(r, 0) && !math.IsNaN(r) {
		return r
	}
	return 0
}
