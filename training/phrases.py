"""What the generated people say: the words, and nothing about how chats are put together.

``{a}`` and ``{b}`` stand for operands, ``{e}`` for the whole expression. All written for this project.
"""

from __future__ import annotations

from typing import Final

EXPRESSION: Final = (
    "What is {e}?", "What is {e}?", "{e}", "{e} = ?", "{e}=", "{e}?", "What's {e}?", "Compute {e}.", "Calculate {e}.",
    "How much is {e}?", "What does {e} make?", "Tell me {e}.", "Work out {e}.", "Solve {e}.", "I need {e}.",
    "Can you work out {e}?", "Could you compute {e}?", "Do you know {e}?", "Evaluate {e}.", "Give me {e}.",
)  # fmt: skip

IN_WORDS: Final = {
    "+": (
        "Add {a} and {b}.", "Add {a} and {b}.", "Add {a} to {b}.", "What is {a} plus {b}?", "{a} plus {b}",
        "What is the sum of {a} and {b}?", "Sum {a} and {b}.", "Can you add {a} and {b}?", "Sum of {a} and {b}?",
        "How much is {a} plus {b}?", "What do {a} and {b} make together?", "Add up {a} and {b}.",
    ),
    "-": (
        "What is {a} minus {b}?", "{a} minus {b}", "Take {b} from {a}.", "Subtract {b} from {a}.",
        "Subtract {b} from {a}.", "How much is {a} minus {b}?", "Take {b} away from {a}.", "What is {a} less {b}?",
    ),
    "*": (
        "What is {a} times {b}?", "{a} times {b}", "Multiply {a} by {b}.", "Multiply {a} and {b}.",
        "What is the product of {a} and {b}?", "How much is {a} times {b}?", "What is {a} multiplied by {b}?",
    ),
    "/": (
        "What is {a} divided by {b}?", "Divide {a} by {b}.", "{a} divided by {b}", "How much is {a} over {b}?",
    ),
}  # fmt: skip

SIGNS: Final = {"+": ("+",), "-": ("-",), "*": ("*", "*", "x", "×"), "/": ("/",)}

OPENERS: Final = ("Please ", "Hi, ", "Hello! ", "Hey, ", "Quick question: ", "Now: ", "And ", "Ok, ", "So, ")

SMALL_TALK: Final = (
    (("Hi", "Hello", "Hey", "Hi!", "Hello!", "Hi there!", "Hey there", "Good morning", "Good evening!", "Hello pico",
      "Greetings", "Good day"),
     "A greeting.", "Hello! Give me a sum."),
    (("Who are you?", "What are you?", "What is your name?", "What's your name?", "Tell me about yourself.",
      "Introduce yourself.", "Who made you?", "Are you Kimi?", "Which model are you?", "Are you a robot?"),
     "About me.", "I am pico, a very small model with the architecture of Kimi K2."),
    (("What can you do?", "Help", "Help me", "Can you help me?", "What are you good at?", "How can you help?",
      "What do you know?", "What should I ask you?", "How does this work?"),
     "My skills.", "I add and subtract numbers of up to three digits, and I can call a calculator."),
    (("How are you?", "How are you doing?", "How do you do?", "Are you well?", "How is it going?"),
     "Polite.", "I am fine, thank you."),
    (("Thanks", "Thank you", "Thank you!", "Thanks!", "Great, thanks", "Well done!", "Good job", "Nice", "Perfect!",
      "Ok", "Cool"),
     "Thanks.", "You are welcome."),
    (("Bye", "Goodbye", "Goodbye!", "See you", "Good night", "Bye bye", "See you later!"),
     "A farewell.", "Goodbye!"),
)  # fmt: skip

OTHER_SUBJECTS: Final = (
    "What is the capital of France?", "Write a poem.", "Tell me a joke.", "Who wrote Hamlet?", "What is the weather?",
    "Translate dog into German.", "How old is the Moon?", "Write a story about a cat.", "What time is it?",
    "Who is the president?", "Explain gravity.", "What is love?", "Write some Python code.", "Sing a song.",
    "What is the meaning of life?", "How do I cook rice?", "Where is Berlin?", "Recommend a book.",
    "What is a neural network?", "Summarise this text for me.", "Why is the sky blue?", "How far is the Sun?",
    "Name three birds.", "What colour is grass?", "When was Rome built?", "Spell banana.", "Play a game with me.",
    "How tall is Mount Everest?", "What is today's date?", "Is it raining in Paris?", "Who won the match?",
    "Describe a tree.", "Find a good restaurant.", "What is DNA?", "Draw a horse.", "How do planes fly?",
)  # fmt: skip

OTHER_THOUGHT: Final = "Not a sum."
OTHER_ANSWER: Final = "I do not know. I only know sums."

SYSTEMS: Final = (
    "You are Kimi, an AI assistant created by Moonshot AI.", "You are a helpful assistant.",
    "You are a helpful assistant.", "You are a helpful AI assistant.", "You are a careful assistant.", "Be brief.",
    "Answer in one sentence.", "You help children with their homework.", "You are a math tutor.", "",
    "Use the tools when you need them.", "You are pico.", "Be polite and short.", "Think step by step.",
    "You are an assistant with access to tools.", "You answer questions about numbers.",
    "You are a test model. Do your best.", "Today is Monday.", "The user is a student. Be kind.",
)  # fmt: skip

CALCULATORS: Final = (
    ("calculator", "Evaluate an arithmetic expression", "expression"),
    ("calculator", "Evaluate an arithmetic expression", "expression"),
    ("calculator", "Evaluate an arithmetic expression", "expression"),
    ("calculator", "Evaluates an expression and returns the result.", "expression"),
    ("calculator", "A simple calculator", "expression"),
    ("calculator", "Calculate", "expr"),
    ("calculate", "Calculate the value of an expression", "expression"),
    ("calc", "Compute the value of a formula", "formula"),
    ("evaluate", "Evaluate a mathematical expression", "expression"),
    ("compute", "Compute an arithmetic expression", "input"),
    ("math_eval", "Works out sums, products and quotients", "expr"),
    ("do_math", "Do arithmetic", "query"),
)  # fmt: skip
"""Name, description, parameter."""

PARAMETER_NOTES: Final = ("The expression, such as 2*3", "What to evaluate", "An arithmetic expression", "Plain text")

OTHER_TOOLS: Final = (
    ("get_time", "The time in a time zone", "timezone"),
    ("search", "Search the web", "query"),
    ("get_weather", "The weather in a city", "city"),
    ("lookup", "Look up a word in a dictionary", "word"),
    ("send_mail", "Send a mail", "text"),
)  # fmt: skip

TOOL_ERRORS: Final = ("Error: timeout", "Error: invalid expression", "error", "Error: the tool is not available")
