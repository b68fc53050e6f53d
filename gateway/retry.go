package gateway

import (
	"time"

	"github.com/tandem-serving/tandem/gateway/upstream"
	"github.com/tandem-serving/tandem/internal/obs/metrics"
	"github.com/tandem-serving/tandem/internal/openai"
)

// Between two looks for a node, while there is none for a stream that has begun.
const (
	firstPause   = 50 * time.Millisecond
	longestPause = time.Second
)

// started says that a choice has tokens that its client may have seen.
func (c *choice) started() bool { return len(c.output) > 0 }

// taken notes that a node has the current attempt.
func (c *choice) taken() { c.accepted, c.lost, c.pause = true, time.Time{}, 0 }

// retry ends a choice's current attempt, which failed, and starts the next one.
// A choice without a token yet is tried on a few nodes. One that has begun is
// resumed: prompt and output so far go to another node, at exactly the next
// position, and where no node takes them it waits for one, a bounded time.
func (j *job) retry(c *choice, err error) *openai.Error {
	node, f := c.node, nodeFailure(err)
	c.failSpan(f)
	j.leave(c)
	c.stream = nil
	if fault := j.failed(c, node, f); fault != nil {
		return fault
	}
	if !c.started() {
		return j.attempt(c)
	}
	j.g.meters.resumes.Inc()
	r := j.g.resumes.Reserve()
	if wait := r.Delay(); wait > j.g.lim().ResumeTimeout {
		r.Cancel()
		return j.lose(c)
	} else if wait > 0 { // many at once: the nodes that are left take them one after the other
		j.sleep(c, wait)
		return nil
	}
	return j.attempt(c)
}

// failed records a failed attempt. It returns an error when there may be no other.
func (j *job) failed(c *choice, node *upstream.Node, f *failure) *openai.Error {
	c.failSpan(f)
	j.g.meters.set.Counter(metrics.GatewayAttemptFailures, f.kind).Inc()
	j.g.log.Warn("attempt failed", "request", j.req.RequestID, "node", node.Name, "error", f.err)
	moved := len(c.output) > c.from // since the attempt began
	if moved {
		c.tried, c.refused, c.failures = c.tried[:0], c.refused[:0], 0
	}
	if c.lost.IsZero() {
		c.lost = time.Now()
	}
	if c.accepted { // nodes that refused before may have room again, or be back
		c.refused = c.refused[:0]
	}
	c.tried, c.failure = append(c.tried, node), f
	if f.refused && !moved && !(c.accepted && f.handedOver) {
		c.refused = append(c.refused, node)
	}
	unseen := f.lost && !c.accepted // the connection ended with the attempt on its way: that says nothing about the request
	if !moved && !unseen && !(c.started() && f.untouched) {
		c.failures++
	}
	switch {
	case f.final, c.failures >= j.g.lim().MaxAttempts:
		return j.lose(c)
	case !c.started() && !j.g.budget.Allow():
		return f.fault()
	}
	return nil
}

// enterClass notes the numerics class of the node that sends a choice's next token.
// A stream that enters another class keeps the tokens that it has; those that follow
// may differ from what the class before would have drawn.
func (j *job) enterClass(c *choice) {
	class := c.node.Class()
	if c.started() && c.class != "" && class != "" && class != c.class {
		j.g.meters.classChanges.Inc()
		j.g.log.Warn("stream continues in another numerics class: no node of its own is usable", "request", j.req.RequestID,
			"node", c.node.Name, "tokens", len(c.output), "class", class, "before", c.class)
	}
	c.class = class
}

// nowhere is what becomes of a choice that no node is left for: a stream that
// has begun waits for one, within ResumeTimeout. node is one that would be asked
// again, or nil.
func (j *job) nowhere(c *choice, node *upstream.Node) *openai.Error {
	switch {
	case !c.started() && node != nil:
		return c.failure.fault()
	case !c.started():
		return j.noNode()
	case c.lost.IsZero(): // it was paused for its client
		c.lost = time.Now()
	}
	if time.Since(c.lost) >= j.g.lim().ResumeTimeout {
		return j.lose(c)
	}
	c.tried, c.refused = c.tried[:0], c.refused[:0] // whoever said no, or was away, may have recovered
	c.pause = min(max(firstPause, 2*c.pause), longestPause)
	j.sleep(c, c.pause)
	return nil
}

// sleep has the choice look for a node again later.
func (j *job) sleep(c *choice, d time.Duration) {
	c.again = time.Now().Add(d)
	j.wake(c.again)
}

// lose gives a choice up.
func (j *job) lose(c *choice) *openai.Error {
	if c.started() {
		j.cause = "upstream"
	}
	if c.failure == nil {
		return j.noNode()
	}
	return c.failure.fault()
}

func (j *job) noNode() *openai.Error {
	return openai.Unavailable(retryAfter, "no decode node is available for model %q", j.model.name)
}
