"""Tell real from tampered videos: seven stages and stratified folds of whole groups."""
