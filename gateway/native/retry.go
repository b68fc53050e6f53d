package native

import (
	"time"

	"github.com/tandem-serving/tandem/gateway/api/openai"
	"github.com/tandem-serving/tandem/gateway/exchange"
	fsm "github.com/tandem-serving/tandem/gateway/exchange/choice"
	"github.com/tandem-serving/tandem/gateway/native/nodes"
)

// done reports whether the choice has its last token.
func (c *choice) done() bool { return c.state.State() == fsm.Finished }

// retry ends a choice's current attempt, which failed, and starts the next one.
// A choice without a token yet is tried on a few nodes. One that has begun is
// resumed: prompt and output so far go to another node, at exactly the next
// position, and where no node takes them it waits for one, a bounded time.
func (j *job) retry(c *choice, err error) *openai.Error {
	node, f := c.node, nodeFailure(err)
	exchange.FailSpan(&c.span, f)
	j.leave(c)
	c.stream = nil
	if fault := j.failed(c, node, f); fault != nil {
		return fault
	}
	if !c.state.Started() {
		return j.attempt(c)
	}
	j.S.Meters.Resumes.Inc()
	r := j.S.Resumes.Reserve()
	if wait := r.Delay(); wait > j.S.Limits().ResumeTimeout {
		r.Cancel()
		return j.lose(c)
	} else if wait > 0 { // many at once: the nodes that are left take them one after the other
		c.state.Delay(time.Now().Add(wait))
		j.wake(c.state.RetryAt())
		return nil
	}
	return j.attempt(c)
}

// failed records a failed attempt. It returns an error when there may be no other.
func (j *job) failed(c *choice, node *nodes.Node, f *exchange.Failure) *openai.Error {
	j.AttemptFailed(f, &c.span, "node", node.Name)
	c.failure = f
	if exchange.Next(&j.Exchange, &c.state, node, f) == fsm.GiveUp {
		return j.lose(c)
	}
	return nil
}

// enterClass notes the numerics class of the node that sends a choice's next token.
// A stream that enters another class keeps the tokens that it has; those that follow
// may differ from what the class before would have drawn.
func (j *job) enterClass(c *choice) {
	class := c.node.Class()
	if c.state.Started() && c.class != "" && class != "" && class != c.class {
		j.S.Meters.ClassChanges.Inc()
		j.S.Log.Warn("stream continues in another numerics class: no node of its own is usable", "request", j.req.RequestID,
			"node", c.node.Name, "tokens", len(c.output), "class", class, "before", c.class)
	}
	c.class = class
}

// nowhere is what becomes of a choice that no node is left for: a stream that
// has begun waits for one, within ResumeTimeout. node is one that would be asked
// again, or nil.
func (j *job) nowhere(c *choice, node *nodes.Node) *openai.Error {
	if c.state.NoNode(time.Now(), j.S.ChoiceLimits()) == fsm.Wait {
		j.wake(c.state.RetryAt())
		return nil
	}
	if !c.state.Started() && node == nil {
		c.failure = nil
	}
	return j.lose(c)
}

// lose gives a choice up.
func (j *job) lose(c *choice) *openai.Error {
	c.state.Abandon()
	return j.NoAttempt(c.failure, "decode node", j.model.Name, c.state.Started())
}
