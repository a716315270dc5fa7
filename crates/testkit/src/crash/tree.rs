//! Which crash states are one to recovery: a tree of what recoveries read.
//!
//! A recovery is a function of the blocks that it reads. All states of one point agree but in the varying blocks, so a
//! recovery that ran decides every state that has the same contents in the varying blocks that it *read*: it would read
//! the same, do the same and end the same. An inner node of the tree is the block that is read next, its branches are
//! the contents met so far, a leaf is what came of it. (Jaaru, ASPLOS 2021, uses the same fact: only writes that
//! recovery reads can matter.) The explorer runs a sample of the states so decided all the same, and compares.

/// See the module. A state is the content of each varying block ([`crate::late`]).
#[derive(Debug)]
pub struct ReadTree<V> {
    nodes: Vec<Node<V>>,
}

#[derive(Debug)]
enum Node<V> {
    Empty,
    Read { block: u32, next: Vec<(u32, u32)> },
    Leaf(V),
}

impl<V> Default for ReadTree<V> {
    fn default() -> Self {
        Self { nodes: vec![Node::Empty] }
    }
}

impl<V> ReadTree<V> {
    /// What came of a recovery that read the same as the one of `state` would.
    pub fn find(&self, state: &[u32]) -> Option<&V> {
        let mut at = 0;
        loop {
            match &self.nodes[at] {
                Node::Empty => return None,
                Node::Leaf(v) => return Some(v),
                Node::Read { block, next } => {
                    let content = state[*block as usize];
                    at = next.iter().find(|(c, _)| *c == content)?.1 as usize;
                }
            }
        }
    }

    /// Adds what came of the recovery of `state`, which read `reads`. False where an earlier one read something else
    /// at this place: then recovery depends on more than what it reads, and nothing is added.
    pub fn insert(&mut self, state: &[u32], reads: &[u32], value: V) -> bool {
        let mut at = 0;
        for read in reads {
            if matches!(self.nodes[at], Node::Empty) {
                self.nodes[at] = Node::Read { block: *read, next: Vec::new() };
            }
            let new = self.nodes.len() as u32;
            let Node::Read { block, next } = &mut self.nodes[at] else { return false };
            if block != read {
                return false;
            }
            let content = state[*read as usize];
            at = match next.iter().find(|(c, _)| *c == content) {
                Some((_, n)) => *n as usize,
                None => {
                    next.push((content, new));
                    self.nodes.push(Node::Empty);
                    new as usize
                }
            };
        }
        let free = matches!(self.nodes[at], Node::Empty);
        if free {
            self.nodes[at] = Node::Leaf(value);
        }
        free
    }
}

#[cfg(test)]
mod tests {
    use super::ReadTree;

    #[test]
    fn states_that_agree_in_what_was_read_are_one() {
        let mut t = ReadTree::default();
        assert_eq!(t.find(&[0, 0, 0]), None);
        // reads block 1, finds 0 there, is done
        assert!(t.insert(&[0, 0, 0], &[1], 'a'));
        assert_eq!(t.find(&[7, 0, 9]), Some(&'a'));
        assert_eq!(t.find(&[7, 1, 9]), None);
        // finds 1 there, so reads block 0 too
        assert!(t.insert(&[3, 1, 0], &[1, 0], 'b'));
        assert_eq!(t.find(&[3, 1, 5]), Some(&'b'));
        assert_eq!(t.find(&[4, 1, 5]), None);
        assert!(!t.insert(&[4, 1, 5], &[2], 'c'), "the first read is of block 1");
        assert!(!t.insert(&[3, 1, 5], &[1, 0], 'c'), "known already");
        let mut all = ReadTree::default();
        assert!(all.insert(&[1, 2], &[], 'x'));
        assert_eq!(all.find(&[5, 6]), Some(&'x'));
    }
}
