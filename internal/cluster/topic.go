package cluster

// maxTopicMessage bounds a message of a topic in bytes.
const maxTopicMessage = 4 << 10

// topicSubject returns the NATS subject of a topic, whose name has letters only.
func topicSubject(topic string) string { return "tandem.topic." + topic }

// Send sends a message to the listeners of a topic on all members, this one included. It returns
// false if there is no server or the message is too long: it is lost.
func (b *Bus) Send(topic string, m []byte) bool {
	conn := b.conn.Load()
	return conn != nil && len(m) <= maxTopicMessage && conn.Publish(topicSubject(topic), m) == nil
}

// Listen calls f with each message of a topic, on a goroutine of the bus, until the bus is closed.
// f must not keep the message.
func (b *Bus) Listen(topic string, f func(m []byte)) {
	b.add(&Subscription{bus: b, subject: topicSubject(topic), handle: func(m []byte) {
		if len(m) <= maxTopicMessage {
			f(m)
		}
	}})
}
