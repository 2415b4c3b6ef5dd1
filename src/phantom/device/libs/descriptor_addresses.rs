//! The device addresses in the descriptors of a math library. A launch with the descriptor may use them.

use std::collections::{BTreeMap, HashMap};
use std::ffi::c_int;
use std::sync::{LazyLock, Mutex};

use crate::core::lock::lock;

/// The addresses in the attributes of a descriptor, by attribute.
type Attributes = BTreeMap<c_int, Vec<usize>>;

/// The addresses in the descriptors of one library, by the handle of the descriptor.
pub(crate) struct DescriptorAddresses(LazyLock<Mutex<HashMap<usize, Attributes>>>);

impl DescriptorAddresses {
    /// Creates a table without descriptors.
    pub(crate) const fn new() -> Self {
        Self(LazyLock::new(Mutex::default))
    }

    /// Sets the addresses in an attribute, and replaces the earlier ones.
    pub(crate) fn set(&self, descriptor: usize, attribute: c_int, addresses: Vec<usize>) {
        lock(&self.0).entry(descriptor).or_default().insert(attribute, addresses);
    }

    /// Returns the addresses in a descriptor, or `None` if no attribute of it was set.
    pub(crate) fn of_descriptor(&self, descriptor: usize) -> Option<Vec<usize>> {
        lock(&self.0).get(&descriptor).map(|attributes| attributes.values().flatten().copied().collect())
    }

    /// Forgets a descriptor that was destroyed.
    pub(crate) fn remove(&self, descriptor: usize) {
        lock(&self.0).remove(&descriptor);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_attribute_that_is_set_again_replaces_its_addresses() {
        let addresses = DescriptorAddresses::new();
        assert_eq!(addresses.of_descriptor(7), None);
        addresses.set(7, 1, vec![10]);
        addresses.set(7, 2, vec![20, 21]);
        addresses.set(7, 1, vec![11]);
        assert_eq!(addresses.of_descriptor(7), Some(vec![11, 20, 21]));
        addresses.set(7, 2, Vec::new());
        assert_eq!(addresses.of_descriptor(7), Some(vec![11]));
        addresses.remove(7);
        assert_eq!(addresses.of_descriptor(7), None);
    }
}
