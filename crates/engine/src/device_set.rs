//! Some of a volume's devices, by their numbers.

use braidfs_format::super_block::MAX_DEVICES;
use std::fmt;

/// Devices that a tenant may use; [`Self::ALL`] are also those that come later.
#[derive(Clone, Copy, PartialEq, Eq, Default)]
pub struct DeviceSet(u32);

impl DeviceSet {
    /// All that the volume has, or will have.
    pub const ALL: Self = Self(0);

    /// These and no others. `None` where there are none, or a number is above those that a volume can have.
    pub fn of(numbers: impl IntoIterator<Item = usize>) -> Option<Self> {
        let bits = numbers.into_iter().try_fold(0, |bits, n| (n < MAX_DEVICES).then(|| bits | 1 << n))?;
        (bits > 0).then_some(Self(bits))
    }

    /// As a domain's header has them: a bit for each number, 0 for all.
    pub fn from_bits(bits: u32) -> Self {
        Self(bits)
    }

    /// The same the other way round.
    pub fn bits(self) -> u32 {
        self.0
    }

    /// Whether none is left out.
    pub fn is_all(self) -> bool {
        self.0 == 0
    }

    /// Whether the device with this number is one of them.
    pub fn contains(self, number: usize) -> bool {
        self.is_all() || u32::try_from(number).is_ok_and(|n| n < u32::BITS && self.0 & 1 << n != 0)
    }

    /// Their numbers, where some are left out; those of devices that the volume has not are among them.
    pub fn numbers(self) -> impl Iterator<Item = usize> {
        (0..MAX_DEVICES).filter(move |n| !self.is_all() && self.contains(*n))
    }

    /// Those of a volume that has so many. `None`: none of them.
    pub fn within(self, devices: usize) -> Option<Self> {
        if self.is_all() { Some(self) } else { Self::of(self.numbers().filter(|n| *n < devices)) }
    }
}

impl fmt::Display for DeviceSet {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.is_all() {
            return f.write_str("all");
        }
        let numbers: Vec<String> = self.numbers().map(|n| n.to_string()).collect();
        f.write_str(&numbers.join(","))
    }
}

impl fmt::Debug for DeviceSet {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "DeviceSet({self})")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_set_has_the_numbers_that_it_was_made_of() {
        let some = DeviceSet::of([2, 0, 2]).unwrap();
        assert_eq!((some.numbers().collect::<Vec<_>>(), some.to_string().as_str()), (vec![0, 2], "0,2"));
        assert!(some.contains(0) && !some.contains(1) && some.contains(2) && !some.contains(40));
        assert_eq!((some.bits(), DeviceSet::from_bits(5)), (5, some));
        assert_eq!((some.within(2), some.within(3)), (DeviceSet::of([0]), Some(some)));
        assert_eq!(DeviceSet::of([2]).unwrap().within(2), None);
        assert!(DeviceSet::of([]).is_none() && DeviceSet::of([MAX_DEVICES]).is_none());
        let all = DeviceSet::ALL;
        assert!(all.contains(0) && all.contains(40) && all.is_all() && all.numbers().next().is_none());
        assert_eq!((all.within(1), all.to_string().as_str()), (Some(all), "all"));
    }
}
