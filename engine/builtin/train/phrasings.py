"""The phrasings of each kind of fact, with a subject in braces: what people type, from a whole sentence to a bare word.

The phrasings of heldout.py are no part of these, nor contained in one of them: those measure what was learnt here. {s} is a subject with its article,
{b} without, {c} a command, a status code or a Go name, {t} a task, {r} a reason phrase, {w} a word.
"""

TOPIC = ["What is {s}?", "What's {s}?", "whats {s}", "Explain {s}.", "Can you explain {s}?", "Tell me about {s}.", "What does {b} mean?", "Define {s}.",
         "{b}?", "{b}", "Do you know what {s} is?", "I want to know what {s} is.", "Please explain {s} to me.", "What do you mean by {s}?",
         "How would you describe {s}?", "Could you tell me what {s} is?", "Give me a short explanation of {s}.", "Help me understand {s}.",
         "I don't understand {s}.", "So what exactly is {s}?", "What is meant by {s}?", "the meaning of {b}", "And what is {s}?", "What about {s}?",
         "Can you tell me what {s} is?", "Tell me what {s} is.", "Describe {s}.", "what is {s} in llm serving", "How does {s} work?", "what is {s} for",
         "Can you tell me about {s}?", "I have a question about {s}.", "please tell me what {s} means", "What is the definition of {s}?",
         "Why do we need {s}?", "teach me about {s}", "I have never heard of {s}.", "Is {s} important?", "explain {s} in simple words"]
UNIX = ["What does {c} do?", "What does the {c} command do?", "What is {c}?", "what is the {c} command", "Explain {c}.", "Explain the {c} command.", "What is {c} for?",
        "what is {c} used for", "{c} command", "the {c} command", "man {c}", "Tell me about the {c} command.", "What does {c} do in Linux?", "what is {c} in unix",
        "Do you know the {c} command?", "How does {c} work?", "Can you explain the {c} command?", "Describe the {c} command.", "and {c}?", "what about {c}",
        "Please explain {c}.", "whats {c}", "Tell me what {c} does.", "I want to know what {c} does.", "when do I use {c}", "what can I do with {c}",
        "How do I use {c}?", "How do I use the {c} command?", "what happens when I type {c}", "unix command {c}", "Can you tell me what {c} does?"]
TASK = ["How do I {t}?", "How can I {t}?", "How do I {t} in Linux?", "How can I {t} in the shell?", "Which command do I use to {t}?", "I want to {t}.",
        "What command can {t}?", "command to {t}", "how to {t}", "Which Unix command can {t}?", "what is the command to {t}", "I need to {t}.",
        "Tell me how to {t}.", "Is there a command to {t}?", "with which command can I {t}", "how does one {t} in unix"]
HTTP = ["What does HTTP {c} mean?", "What is HTTP {c}?", "What does {c} mean?", "what is http status {c}", "http {c}", "{c}", "status {c}", "Explain HTTP {c}.",
        "What is status code {c}?", "What does status code {c} mean?", "I get a {c}.", "Why do I get a {c}?", "error {c}", "what is error {c}", "http status code {c}",
        "Tell me about HTTP {c}.", "What does the HTTP status {c} mean?", "the server returns {c}", "the server answers {c}, why", "what is a {c}", "explain {c}",
        "meaning of http {c}", "My request failed with {c}.", "And {c}?", "What about {c}?", "Can you explain HTTP {c}?", "what is a {c} error", "what does a {c} mean",
        "Do you know what HTTP {c} means?", "Tell me what {c} means.", "and what is {c}", "What is the meaning of HTTP {c}?", "what is code {c}"]
REASON = ["What does {r} mean?", "What is the status code for {r}?", "Which HTTP status is {r}?", "http {r}", "What is the code of {r}?",
          "which status code means {r}", "what is HTTP {r}", "explain the status {r}", "the server says {r}"]


# Sentences around a subject, used for known and unknown subjects alike, so that the frame says nothing about which of the two it is.
TOPIC += ["Somebody at work said {b}. What is it?", "A friend asked me about {s}.", "My boss talked about {s}. What does it mean?", "I read about {s} yesterday. What is this?",
          "Have you heard of {s}?", "I saw {b} in the documentation. What does it mean?", "The manual mentions {s}. What is this?", "I need to understand {s}.",
          "We talked about {s} today. What exactly is it?", "I was wondering what {s} is.", "I wonder what {s} is.", "Is there something called {b}?", "There is a thing called {b}. What is it?",
          "They say I need {s}. What is it?", "What can you tell me about {s}?", "what do you know about {s}", "I would like to learn about {s}.", "can you define {s}",
          "who can tell me what {s} is", "The talk was about {s}. What is it?", "My teacher mentioned {s}. What does that mean?", "Someone mentioned {b}. What is this?",
          "In my team they often mention {s}. What could that be?", "I do not know what {s} is.", "I have no idea what {s} is", "I forgot what {s} is.",
          "What is {s} exactly?", "what is {s} again", "what was {s} again", "{b} - what is it?", "{b}: what does it mean?", "{b} means what?", "what is this {b} thing",
          "People talk about {s} all the time. What is it?", "In a few words, what is {s}?", "give me the definition of {s}", "Could you explain what {s} is?", "would you explain {s} to me",
          "explain to me what {s} is", "I am confused about {s}.", "Let us talk about {s}.", "a question about {s}", "info about {s}", "tell me more about {s}", "what would {s} be",
          "Can somebody explain {s}?", "Would you tell me what {s} is?", "Please define {s}.", "Please tell me about {s}.", "my question is what {s} is", "what's {s} about", "I heard of {s}. Explain it."]
UNIX += ["Somebody told me to use {c}. What does it do?", "A friend uses {c} a lot. What is it?", "My colleague runs {c}. What does that do?", "What would {c} do?", "what is the purpose of {c}",
         "I saw {c} in a script. What does it do?", "The script calls {c}. Why?", "why would I use {c}", "tell me about {c}", "I do not know what {c} does.", "I forgot what {c} does.",
         "What does {c} do again?", "What's the {c} command for?", "what does the command {c} do", "the command {c}", "explain the command {c}", "is {c} a command", "Is there a command called {c}?",
         "Have you heard of {c}?", "explain what {c} does", "Could you tell me what {c} does?", "Could you explain {c}?", "Would you explain the {c} command?", "Please tell me what {c} does.",
         "{c}: what does it do?", "{c}, what is it for", "Give me a short explanation of {c}.", "I was wondering what {c} does.", "what is the use of {c}", "what can {c} do", "I need help with {c}."]
TASK += ["What do I type to {t}?", "Which tool can {t}?", "I would like to {t}.", "can you tell me how to {t}", "Do you know how to {t}?", "what should I use to {t}", "is it possible to {t}",
         "I forgot how to {t}.", "my colleague wants to {t}", "Please tell me how to {t}.", "what is a good way to {t}", "Could you tell me how to {t}?", "help me {t}", "How would I {t}?"]
HTTP += ["The log says {c}. What is it?", "A friend gets a {c}. What is it?", "My boss asked about {c}.", "I saw status {c} in the log.", "my browser shows {c}", "What is the {c} status?",
         "what does the code {c} mean", "Could you tell me what {c} means?", "could you explain {c}", "I do not know what {c} means.", "I forgot what {c} means.", "What does {c} mean again?",
         "curl prints {c}", "the api answers {c}", "we got a {c} from the api, what is it", "What does it mean when I get {c}?", "why {c}", "HTTP/1.1 {c}", "response code {c}",
         "Please explain status {c}.", "Would you explain HTTP {c}?", "I was wondering what {c} means.", "give me the meaning of {c}", "{c}: what does it mean?", "when does a server send {c}"]
GO = ["What does {c} do?", "What does {c} do in Go?", "What is {c}?", "what is {c} in go", "Explain {c}.", "Explain {c} in Go.", "{c}", "{c}?", "What is {c} for?", "what is {c} used for",
      "Tell me about {c}.", "Describe {c}.", "go doc {c}", "How does {c} work?", "Can you explain {c}?", "Do you know {c}?", "what about {c}", "and {c}?", "Tell me what {c} does.",
      "the function {c}", "What does the function {c} do?", "golang {c}", "what does {c} do in golang", "I want to know what {c} does.", "Could you tell me what {c} does?",
      "When do I use {c}?", "why would I use {c}", "Please explain {c}.", "I saw {c} in the code. What does it do?", "The code calls {c}. What is it?", "A friend uses {c}. Why?",
      "I forgot what {c} does.", "What does {c} do again?", "what is the purpose of {c}", "What does {c} mean?", "have you heard of {c}", "I do not understand {c}.", "{c}: what is it?",
      "what happens when I call {c}", "Could you explain {c}?", "Can you tell me what {c} is?", "I was wondering what {c} does.", "tell me what {c} is", "help me understand {c}",
      "my colleague uses {c}, what is it", "Somebody told me to use {c}. What does it do?", "explain what {c} does", "what can I do with {c}"]
GO_PACKAGE = ["What does the package {c} do?", "What is the package {c}?", "what does the {c} package do", "What is the {c} package for?", "Explain the package {c}.", "explain the {c} package",
              "the {c} package", "package {c}", "go package {c}", "What is the Go package {c}?", "What does the {c} package do in Go?", "Tell me about the package {c}.",
              "Describe the {c} package.", "what is the package {c} in go", "What is {c} in Go?", "what does {c} do in go", "golang {c} package", "go doc package {c}", "what is {c} in golang",
              "When do I use the {c} package?", "why would I use the package {c}", "what is package {c} used for", "Please explain the {c} package.", "What can I do with the package {c}?",
              "I forgot what the {c} package does.", "The code imports {c}. What is that package?", "import {c} in go", "Do you know the package {c}?", "Can you explain the Go package {c}?",
              "Could you tell me what the {c} package does?", "what is in the package {c}", "what about the package {c}", "A friend uses the package {c}. What is it?",
              "what is the purpose of the {c} package", "Tell me what the package {c} does.", "tell me about {c} in go", "how does the {c} package work", "standard library package {c}"]
GO_TASK = ["How do I {t} in Go?", "How can I {t} in Go?", "how to {t} in go", "Which function can {t} in Go?", "What do I use to {t} in Go?", "I want to {t} in Go.", "go: {t}", "golang {t}",
           "how to {t} in golang", "What is the function to {t} in Go?", "Tell me how to {t} in Go.", "With Go, how do I {t}?", "How does one {t} in Go?", "I need to {t} in go",
           "is there a go function to {t}", "what is the way to {t} in go", "Which part of Go's standard library do I use to {t}?", "Can you tell me how to {t} in Go?", "In a Go program, how do I {t}?",
           "Could you tell me how to {t} in go?", "I forgot how to {t} in Go.", "do you know how to {t} in go", "go code to {t}", "Please tell me how to {t} in Go.", "help me {t} in go"]
WORD = ["What does {w} mean?", "What does the word {w} mean?", "Define {w}.", "Define the word {w}.", "What is the meaning of {w}?", "What is the meaning of the word {w}?", "the meaning of {w}",
        "meaning of {w}", "{w}", "{w}?", "what does \"{w}\" mean", "What is the definition of {w}?", "definition of {w}", "Explain the word {w}.", "explain {w}", "Tell me what {w} means.",
        "what is meant by {w}", "I do not know the word {w}.", "I don't understand the word {w}.", "Do you know the word {w}?", "Can you explain the word {w}?", "the word {w}",
        "Can you tell me what {w} means?", "Could you tell me what the word {w} means?", "What do you mean by {w}?", "{w} means what?", "what does {w} mean in English", "Give me a definition of {w}.",
        "Please explain the word {w}.", "I read the word {w}. What does it mean?", "Somebody called it {w}. What does that mean?", "my teacher used the word {w}, what is it", "what is the word {w}",
        "a friend used the word {w}. what does it mean", "I forgot what {w} means.", "What does {w} mean again?", "And what does {w} mean?", "what about {w}", "english word {w}", "{w}: what does it mean?",
        "Please define {w}.", "can you define {w}", "I was wondering what {w} means.", "What does it mean to say {w}?", "I want to know what {w} means.", "do you know what {w} means",
        "In English, what is {w}?", "What is {w}?", "what's the meaning of {w} in english", "explain what {w} means", "I have never heard the word {w}.", "help me understand the word {w}"]
