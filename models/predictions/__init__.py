"""From a network and its draws to answers: passes, uncertainty, prediction sets, a model ready to be asked."""
