"""How the model that ships was made: its pictures, what is said of them, and how it learnt both."""
